"""Beside the authors' own code: does it learn the same, keep the same lists, and open the same gates?

    git clone https://github.com/tileb1/AdaSim ~/AdaSim
    git clone https://github.com/facebookresearch/simsiam ~/simsiam
    git clone https://github.com/facebookresearch/dino ~/dino
    python benchmarks/parity.py ~/AdaSim --simsiam ~/simsiam --dino ~/dino      # two minutes on one core, no GPU

The folders are copies of the released code (AdaSim's of commit d463c28, the only one with code); any of the three may
be left out. Their functions are called as their own loops call them, and nothing of them is part of this repository.
Compared are

- whole steps of DINO with a ViT-Tiny in fp64, from the same weights and on the same views: the loss, then the weights
  of student and teacher and the centre after the schedules, clipping, AdamW and the moving average of each step;
- the memory over epochs of drifting features: each image's list of neighbours, whether its gate is open, and p_win;
- whole steps of SimSiam with a ResNet-50 in fp64: the loss and all weights, which its own SGD moves at two rates;
- DINO's k-NN classifier on features of ten overlapping classes.

AdaSim's released code has no SimSiam, no +NN, no oracle and no evaluation. The linear probes of DINO and SimSiam are
whole scripts for GPUs, which this one does not call.

It has not been run on whole checkouts yet: where it was written none could be cloned. There it was tried on the
functions that it calls, typed from the text of the released code, with a shortened ViT of DINO.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import Tensor

from adasim.config import Config
from adasim.eval import knn_accuracy
from adasim.neighbors import NeighborMemory
from adasim.recipes import get_recipe
from adasim.train.loop import learn
from adasim.train.state import build_state

MODULES = ("main_adasim", "utils", "vision_transformer", "adasim_utils.loss", "adasim_utils.dataset")
EPOCHS, STEPS_PER_EPOCH, BATCH = 3, 6, 8
IMAGES, WIDTH, WINDOW, K, TAU = 600, 32, 3, 5, 0.2
MEMORY_EPOCHS = 15  # from the third on, gates may open: 12 times 600 decisions
CLOSE = 1e-6  # similarities that fp32 may put in another order


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("adasim", type=Path, nargs="?", help="the folder with AdaSim's main_adasim.py in it")
    parser.add_argument("--simsiam", type=Path, help="the folder with SimSiam's simsiam/builder.py in it")
    parser.add_argument("--dino", type=Path, help="the folder with DINO's eval_knn.py in it")
    args = parser.parse_args()
    needed = {args.adasim: MODULES, args.simsiam: ("simsiam.builder",), args.dino: ("eval_knn",)}
    for folder, modules in needed.items():
        files = [] if folder is None else [name.replace(".", "/") + ".py" for name in modules]
        if missing := [file for file in files if not (folder / file).is_file()]:
            sys.exit(f"{folder} is no checkout of the released code: it has no {', '.join(missing)}.")
    if not any(needed):
        parser.error("name a checkout to compare with")
    torch.manual_seed(0)
    rows = []
    if args.adasim:
        sys.path.insert(0, str(args.adasim))
        official = SimpleNamespace(**{name.split(".")[-1]: importlib.import_module(name) for name in MODULES})
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rows += [*compare_steps(official), *compare_memory(official)]
        dist.destroy_process_group()
    if args.simsiam:
        sys.path.insert(0, str(args.simsiam))
        rows += compare_simsiam(importlib.import_module("simsiam.builder").SimSiam)
    if args.dino:
        rows += compare_knn(function_of(args.dino / "eval_knn.py", "knn_classifier"))
    for what, value, agrees in rows:
        print(f"{what:58}{value:>16}  {'' if agrees else 'DIFFERS'}")
    sys.exit(not all(agrees for _, _, agrees in rows))


# ---- steps of DINO ----


@contextmanager
def in_fp64() -> Iterator[None]:
    """The package's own `.float()`, which guards against autocast, leaves fp64 as it is."""
    ours = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.float = ours  # type: ignore[method-assign]


def settings() -> Config:
    config = get_recipe("dino-vit-s16")
    config.pairs, config.epochs, config.batch_size, config.precision = "standard", EPOCHS, BATCH, "fp32"
    config.model.name, config.model.drop_path, config.views.size = "vit_tiny", 0.0, 64
    config.optim.warmup_epochs, config.optim.clip_grad = 1, 0.1
    config.settings.out_dim, config.settings.teacher_temp_warmup_epochs = 512, 2
    return config


def compare_steps(official: Any) -> list[tuple[str, str, bool]]:
    """The largest differences over all steps."""
    config = settings()
    dino, optim = config.settings, config.optim
    state = build_state(config, IMAGES)
    ours: Any = state.method.double()
    networks = []
    for network in (ours.student, ours.teacher):
        head = official.vision_transformer.DINOHead(192, dino.out_dim, norm_last_layer=dino.norm_last_layer)
        theirs = official.utils.MultiCropWrapper(
            official.vision_transformer.vit_tiny(patch_size=16, img_size=[config.views.size]), head
        )
        theirs.load_state_dict({k.replace(".net.", "."): v for k, v in network.state_dict().items()})
        networks.append(theirs.double())
    student, teacher = networks
    criterion = official.loss.AdaSimLoss(
        dino.out_dim,
        2,
        dino.teacher_temp_start,
        dino.teacher_temp,
        dino.teacher_temp_warmup_epochs,
        EPOCHS,
        args=SimpleNamespace(local_crops_number=0, batch_size_per_gpu=BATCH),
    ).double()
    optimizer = torch.optim.AdamW(official.utils.get_params_groups(student))
    schedule, length = official.utils.cosine_scheduler, (EPOCHS, STEPS_PER_EPOCH)
    rates = schedule(optim.lr * BATCH / 256, optim.min_lr, *length, warmup_epochs=optim.warmup_epochs)
    decays = schedule(optim.weight_decay, optim.weight_decay_end, *length)
    momenta = schedule(dino.teacher_momentum, 1, *length)

    def train(views: list[Tensor], step: int) -> Tensor:
        """A step as the released loop makes it."""
        for number, group in enumerate(optimizer.param_groups):
            group["lr"] = rates[step]
            if number == 0:
                group["weight_decay"] = decays[step]
        epoch = step // STEPS_PER_EPOCH
        loss = criterion(student(views), teacher(views), epoch)
        optimizer.zero_grad()
        loss.backward()
        official.utils.clip_gradients(student, optim.clip_grad)
        official.utils.cancel_gradients_last_layer(epoch, student, dino.freeze_last_layer_epochs)
        optimizer.step()
        with torch.no_grad():
            for mine, moving in zip(student.parameters(), teacher.parameters(), strict=True):
                moving.mul_(momenta[step]).add_((1 - momenta[step]) * mine)
        return loss.detach()

    worst = {"loss": 0.0, "student": 0.0, "teacher": 0.0, "centre": 0.0}
    with in_fp64():
        for step in range(EPOCHS * STEPS_PER_EPOCH):
            views = [torch.randn(BATCH, 3, 64, 64, dtype=torch.float64) for _ in range(2)]
            state.step, state.epoch = step, step // STEPS_PER_EPOCH
            loss = ours(views, state.epoch).loss
            learn(state, loss, config, STEPS_PER_EPOCH)
            pairs = {
                "loss": [(loss.detach(), train(views, step))],
                "centre": [(ours.center, criterion.center)],
            }
            for name, mine, theirs in (
                ("student", ours.student, student),
                ("teacher", ours.teacher, teacher),
            ):
                known = theirs.state_dict()
                pairs[name] = [(v, known[k.replace(".net.", ".")]) for k, v in mine.state_dict().items()]
            for name, values in pairs.items():
                gap = max(float((a - b).abs().max()) for a, b in values)
                worst[name] = max(worst[name], gap)
    count = EPOCHS * STEPS_PER_EPOCH
    return [
        (f"{count} steps of DINO: {name}, at most", f"{gap:.1e}", gap < 1e-10) for name, gap in worst.items()
    ]


# ---- the memory ----


def compare_memory(official: Any) -> list[tuple[str, str, bool]]:
    """Lists, gates and distributions, every epoch, all images visited once."""
    args = SimpleNamespace(topk=K, vote_nn_nb=WINDOW, sampling_softmax_temp=TAU, nn_rep_type="first")
    memory = NeighborMemory(IMAGES, WIDTH, WINDOW, K)
    cache, ids, similarities = (
        torch.zeros(IMAGES, WIDTH),
        torch.zeros(IMAGES, K).long(),
        torch.zeros(IMAGES, K),
    )
    history = torch.zeros(IMAGES, WINDOW, K).long(), torch.zeros(IMAGES, WINDOW, K)
    data, read, seen = gate_keeper(official, args, *history)
    centre = torch.randn(IMAGES // 10, WIDTH).repeat(10, 1)
    own = centre + 0.7 * torch.randn(IMAGES, WIDTH)
    entries = other_entries = gates = other_gates = opened = 0
    gap = worst_p = 0.0
    for epoch in range(MEMORY_EPOCHS):
        if epoch >= WINDOW:
            neighbours, p = memory.distribution(torch.arange(IMAGES), TAU)
            for i in range(IMAGES):
                read.clear()
                seen.clear()
                data[i]
                is_open, gates = len(read) == 2, gates + 1
                opened += is_open
                other_gates += is_open != bool(neighbours[i, 0] == i)
                if is_open and neighbours[i, 0] == i:
                    worst_p = max(worst_p, float((seen[0].double() - p[i]).abs().max()))
        own = own + 0.2 * torch.randn(IMAGES, WIDTH)  # as weights move
        for batch in torch.randperm(IMAGES).split(60):
            features = own[batch] + 0.9 * torch.randn(60, WIDTH)
            both = torch.cat([features, torch.randn(60, WIDTH)])  # view 2's are not looked at
            same = torch.zeros(60).long()
            official.main_adasim.update_state(
                (None, both), batch, cache, ids, similarities, same, torch.zeros(IMAGES).long(), args
            )
            found, mine = memory.observe(batch, features)
            theirs = similarities[batch]
            gap = max(gap, float((found - theirs).abs().max()))
            steps = (theirs[:, :-1] - theirs[:, 1:] > CLOSE).float()
            clear = torch.nn.functional.pad(
                steps[:, :-1] * steps[:, 1:], (1, 0)
            )  # neither tied above nor below
            clear = torch.cat([steps[:, :1], clear[:, 1:]], dim=1).bool() & (theirs[:, :-1] != 0)
            entries += int(clear.sum())
            other_entries += int((mine != ids[batch])[:, :-1][clear].sum())
        official.main_adasim.update_nn(ids, similarities, *history)
        memory.end_epoch()
    return [
        (f"{entries:,} entries of lists, not tied: other images", f"{other_entries}", other_entries == 0),
        ("similarities, at most", f"{gap:.1e}", gap < CLOSE),
        (f"{gates:,} gates, {opened:,} of them open: decided otherwise", f"{other_gates}", other_gates == 0),
        ("p_win, at most", f"{worst_p:.1e}", worst_p < CLOSE),
    ]


def gate_keeper(
    official: Any, args: Any, ids: Tensor, similarities: Tensor
) -> tuple[Any, list[int], list[Tensor]]:
    """The released data set, of numbers instead of files; what it reads, and the distributions that it draws from.

    It reads a second image only where its gate is open.
    """
    read: list[int] = []
    seen: list[Tensor] = []

    def load(number: int) -> int:
        read.append(number)
        return number

    def softmax(scores: Tensor, dim: int) -> Tensor:
        seen.append(torch.softmax(scores, dim))
        return seen[-1]

    official.dataset.FF = SimpleNamespace(softmax=softmax)
    data = object.__new__(official.dataset.DatasetFolderAdaSim)
    data.args, data.loader, data.samples = args, load, [(i, 0) for i in range(IMAGES)]
    data.nn_matrix_cpu, data.sim_matrix_cpu = ids, similarities
    data.transform = data.target_transform = None
    data.return_index_instead_of_target = True
    return data, read, seen


# ---- SimSiam and k-NN ----


def compare_simsiam(official: Any) -> list[tuple[str, str, bool]]:
    """Steps as SimSiam's main_simsiam.py makes them: SGD with momentum, the predictor's rate fixed."""
    config = get_recipe("simsiam-resnet50")
    config.pairs, config.epochs, config.batch_size, config.views.size = "standard", 5, BATCH, 32
    state = build_state(config, IMAGES)
    ours: Any = state.method.double()
    theirs = official(torchvision.models.resnet50).double()

    def named(network: Any) -> dict[str, Tensor]:
        """Our weights under their names."""
        places = {"encoder.net.": "encoder.", "projector.": "encoder.fc.", "predictor.": "predictor."}
        return {
            place + name.removeprefix(own): tensor
            for name, tensor in network.state_dict().items()
            for own, place in places.items()
            if name.startswith(own)
        }

    theirs.load_state_dict(named(ours))
    rate = config.optim.lr * BATCH / 256
    groups = [
        {"params": theirs.encoder.parameters(), "fix_lr": False},
        {"params": theirs.predictor.parameters(), "fix_lr": True},
    ]
    optimizer = torch.optim.SGD(groups, rate, momentum=0.9, weight_decay=config.optim.weight_decay)
    similar = torch.nn.CosineSimilarity(dim=1)
    worst = {"loss": 0.0, "weights": 0.0}
    steps_per_epoch = 4
    with in_fp64():
        for step in range(config.epochs * steps_per_epoch):
            views = [torch.randn(BATCH, 3, 32, 32, dtype=torch.float64) for _ in range(2)]
            state.step, state.epoch = step, step // steps_per_epoch
            loss = ours(views, state.epoch).loss
            learn(state, loss, config, steps_per_epoch)
            for group in optimizer.param_groups:
                falling = rate * 0.5 * (1 + math.cos(math.pi * state.epoch / config.epochs))
                group["lr"] = rate if group["fix_lr"] else falling
            p1, p2, z1, z2 = theirs(*views)
            their_loss = -(similar(p1, z2).mean() + similar(p2, z1).mean()) * 0.5
            optimizer.zero_grad()
            their_loss.backward()
            optimizer.step()
            known, mine = theirs.state_dict(), named(ours)
            gap = max(float((mine[name] - known[name]).abs().max()) for name in known)
            worst["weights"] = max(worst["weights"], gap)
            worst["loss"] = max(worst["loss"], float((loss - their_loss).detach().abs()))
    count = config.epochs * steps_per_epoch
    return [
        (f"{count} steps of SimSiam: {name}, at most", f"{gap:.1e}", gap < 1e-10)
        for name, gap in worst.items()
    ]


def compare_knn(official: Any) -> list[tuple[str, str, bool]]:
    """Accuracies of both, for the k that DINO reports."""
    labels = torch.arange(10).repeat(300)
    features = torch.nn.functional.normalize(torch.randn(10, 64)[labels] + 3 * torch.randn(3000, 64), dim=1)
    split = features[:2000], labels[:2000], features[2000:], labels[2000:]
    rows = []
    for k in (10, 20, 100, 200):
        theirs, _ = official(*split, k, 0.07, num_classes=10)
        mine = knn_accuracy(*split, k=k).top1
        rows.append((f"k-NN, k = {k}: {theirs:.2f} and", f"{mine:.2f}", abs(mine - theirs) < 1e-9))
    return rows


def function_of(file: Path, name: str) -> Any:
    """One function of a script whose other lines may need what is not installed."""
    tree = ast.parse(file.read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
    names: dict[str, Any] = {"torch": torch}
    exec(compile(tree, str(file), "exec"), names)
    return names[name]


if __name__ == "__main__":
    main()
