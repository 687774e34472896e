"""Images per second of processor time, beside what people would pick instead: lightly, and DINO's own pipeline.

    python benchmarks/peers.py                                   # some six minutes on one core
    python benchmarks/peers.py --rounds 1 --images 2560 --vit-batch 2       # a quick try

Both sides run in one process with one thread, take turns, and are charged for all processor time of that process;
the median over the rounds counts. lightly comes from PyPI into an environment of its own (build/peers), which sees
the packages of the environment that started this script: torch, torchvision and PIL are the same build for both.

**32 pixels.** SimSiam as `desk-resnet` trains it: the same encoder, heads of the same widths, SGD, batches of 128 of
the same 10,000 generated colour images. Ours is a whole epoch of the package's own training loop, all of it: partners
drawn from the window, views, forward, backward, optimiser, the neighbour memory's search, progress, metrics and the
watch for collapse; only checkpoints are left out. lightly's is the loop of its documentation: a DataLoader without
worker processes (with them, sending batches would be charged, too), its `SimSiamTransform`, no neighbours. Both have
the same augmentations, once the recipe's (crops of at least 0.4, no blur), once the defaults of lightly's transform
(at least 0.2, blur of every other view). The last line changes one thing in lightly's loop that its documentation
does not have, channels-last tensors.

**224 pixels, views.** Two views of JPEG files of 500 x 375 pixels, decoding included. The files are generated (no
photographs are at hand here): noise with the spectrum of photographs. DINO's pipeline is written from its
description. Ours is split: what loader processes do; that, and what an accelerator would do, on the same core.

**224 pixels, step.** DINO with ViT-S/16 and two views that are already there: forward passes of student and teacher,
head of 65,536 outputs, loss, centre, backward, AdamW, moving average; for ours also the memory's search of `--rows`
images. Small batches, since one core takes a second per image.

Not compared: GPUs, several processes, and what is learnt.
"""

from __future__ import annotations

import argparse
import io
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _memory import fill
from _report import report, take_turns
from torch import Tensor
from views import dino_view, photo

from adasim.config import Config
from adasim.data import ArrayImages, BatchedViews, FolderImages, PairLoader, synthetic
from adasim.data.crops import CropWorker
from adasim.data.pool import TASK
from adasim.methods import build_method
from adasim.neighbors import NeighborMemory
from adasim.recipes import get_recipe
from adasim.runs.checkpoint import CheckpointStore
from adasim.runs.folder import RunFolder
from adasim.train.loop import Training, learn
from adasim.train.state import build_state

LIGHTLY = "lightly==1.6.0"
ENVIRONMENT = Path(__file__).parent.parent / "build" / "peers"
PHOTOS = 64
Contenders = dict[str, Callable[[], int]]
"""Each does a round of work and returns how many images it was."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=10_000, help="at 32 pixels")
    parser.add_argument("--steps", type=int, default=20, help="of lightly at 32 pixels, per round")
    parser.add_argument("--rows", type=int, default=100_000, help="images in the memory beside ViT-S/16")
    parser.add_argument("--vit-batch", type=int, default=8)
    parser.add_argument(
        "--compile", action="store_true", help="a line with --compile, too: some minutes more"
    )
    parser.add_argument("--only", choices=("small", "views", "step"), help="one part; nothing is written")
    args = parser.parse_args()
    if Path(sys.prefix).resolve() != ENVIRONMENT.resolve():
        python = make_environment()
        os.execv(python, [str(python), *sys.argv])

    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        if args.only in (None, "small"):
            for augmentations in ("recipe", "lightly"):
                small = small_images(args, augmentations, Path(folder))
                what = f"SimSiam step, 32 pixels, {augmentations}'s views"
                rows += measure(what, small, args.rounds, 2.5 if augmentations == "recipe" else "")
        if args.only in (None, "views"):
            rows += measure("views of photos, 224 pixels", photo_views(Path(folder)), args.rounds, 3.0)
        if args.only in (None, "step"):
            steps = vit_steps(args.vit_batch, args.rows)
            rows += measure("DINO step, ViT-S/16, 224 pixels", steps, args.rounds, 1.0)
    if args.only:
        print("\n".join(map(str, rows)))
    else:
        report("peers", {**vars(args), "peer": LIGHTLY}, rows)


def make_environment() -> Path:
    """An environment with lightly that sees this one's packages; returns its Python."""
    python = ENVIRONMENT / "bin" / "python"
    if not (ENVIRONMENT / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", ENVIRONMENT], check=True)
        mine = Path(torch.__file__).parent.parent
        (theirs,) = ENVIRONMENT.glob("lib/python*/site-packages")
        (theirs / "project.pth").write_text(f"import site; site.addsitedir({str(mine)!r})\n")
        install = [str(python), "-m", "pip", "install", "--quiet"]
        subprocess.run([*install, "--ignore-installed", "--no-deps", LIGHTLY], check=True)
        subprocess.run([*install, LIGHTLY], check=True)  # what it needs and this environment has not
        (ENVIRONMENT / "ready").touch()
    return python


def measure(what: str, contenders: Contenders, rounds: int, goal: float | str = "") -> list[dict[str, Any]]:
    """A row for each of ours against each of theirs; the goal is that of the first comparison."""
    counts: dict[str, int] = {}

    def counted(name: str, run: Callable[[], int]) -> Callable[[], None]:
        return lambda: counts.update({name: run()})

    taken = take_turns({n: counted(n, run) for n, run in contenders.items()}, rounds, time.process_time)
    rates = {name: counts[name] / seconds for name, seconds in taken.items()}
    ours = [name for name in rates if name.startswith("adasim")]
    rows = [
        {
            "what": what,
            "ours": mine,
            "theirs": theirs,
            "ours, images per CPU second": rates[mine],
            "theirs, images per CPU second": rates[theirs],
            "times as fast": rates[mine] / rates[theirs],
            "goal": "",
        }
        for mine in ours
        for theirs in rates
        if theirs not in ours
    ]
    rows[0]["goal"] = goal
    return rows


# ---- 32 pixels ----


def colour_images(count: int) -> Tensor:
    """uint8 (count, 3, 32, 32): three generated grey images make one in colour."""
    grey = synthetic(count + 2).images
    return torch.cat([grey[:-2], grey[1:-1], grey[2:]], 1)


def small_images(args: argparse.Namespace, augmentations: str, folder: Path) -> Contenders:
    """SimSiam with the recipe `desk-resnet`: our training loop, lightly's, and lightly's in channels-last format."""
    from _peers import LightlySimSiam

    config = get_recipe("desk-resnet")
    transform: dict[str, Any] = {"min_scale": config.views.scale[0], "gaussian_blur": 0.0}
    transform["normalize"] = {"mean": [config.views.mean[0]] * 3, "std": [config.views.std[0]] * 3}
    if augmentations == "lightly":
        transform = {}
        config.views = replace(config.views, scale=(0.2, 1.0), blur=1.0)
        config.views = replace(config.views, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    images = ArrayImages("generated", colour_images(args.images))

    encoder = build_method(config, config.views.size).eval_encoder

    def lightly(channels_last: bool) -> Callable[[], int]:
        peer = LightlySimSiam(
            encoder.net,
            (encoder.dim, config.settings.proj_dim, config.settings.pred_dim),
            images.images.permute(0, 2, 3, 1).contiguous().numpy(),
            config.batch_size,
            {"lr": config.optim.lr / 2, "momentum": 0.9, "weight_decay": config.optim.weight_decay},
            transform,
            channels_last,
        )
        return lambda: peer.train(args.steps)

    contenders = {"adasim, with its memory": our_epochs(config, images, folder / augmentations)}
    if args.compile and augmentations == "recipe":
        compiled = replace(config, compile=True)
        contenders["adasim --compile, with its memory"] = our_epochs(compiled, images, folder / "compiled")
    return contenders | {"lightly": lightly(False), "lightly, channels-last by hand": lightly(True)}


def our_epochs(config: Config, images: ArrayImages, out: Path) -> Callable[[], int]:
    """Trains one more epoch at each call: from the middle of a run, with a full window."""
    config.save.every_minutes = 1e6
    state = build_state(config, len(images))
    assert state.memory is not None
    fill(state.memory)
    state.epoch = state.memory.epochs
    loader = PairLoader(images, config.views, batch_size=config.batch_size, seed=0)
    facts = {"fingerprint": images.fingerprint(), "listing": images.listing()}
    run, store = RunFolder.create(out, config, facts), CheckpointStore(out, keep=1)
    training = Training(config, run, images, loader, state, store)
    training.report.__enter__()

    def epoch() -> int:
        training.train_epoch()
        return loader.steps_per_epoch * config.batch_size

    return epoch


# ---- 224 pixels ----


def photo_views(folder: Path) -> Contenders:
    """Two views of JPEG files: ours, DINO's published pipeline, lightly's."""
    from _peers import from_files, lightly_dino_views

    folder = folder / "photos"
    folder.mkdir()
    paths = [str(folder / f"{i:03d}.jpg") for i in range(PHOTOS)]
    for i, path in enumerate(paths):
        photo(375, 500, seed=i).save(path, quality=90)
    config = get_recipe("dino-vit-s16").views
    published = [dino_view(config, view) for view in (1, 2)]
    worker, device = CropWorker(FolderImages(folder), config, seed=0), BatchedViews(config)
    ids, numbers = torch.arange(PHOTOS), (1, 2)
    side = config.size
    cut_crops = [torch.empty(PHOTOS, 3, side, side, dtype=torch.uint8) for _ in numbers]

    def cut() -> int:
        for rows, *parts in zip(ids.split(TASK), *(crops.split(TASK) for crops in cut_crops), strict=True):
            worker((0, numbers), [(i, i) for i in rows.tolist()], parts)
        return PHOTOS

    def cut_and_finish() -> int:
        cut()
        for number, crops in zip(numbers, cut_crops, strict=True):
            device.of_crops(crops, number, 0, 0, ids)
        return PHOTOS

    def theirs(transform: Callable[..., Any]) -> Callable[[], int]:
        return lambda: sum(1 for _ in from_files(paths, transform))

    return {
        "adasim, loader process (crops)": cut,
        "adasim, and the device's part (colours) on the same core": cut_and_finish,
        "DINO's published pipeline": theirs(lambda image: [view(image) for view in published]),
        "lightly": theirs(lightly_dino_views()),
    }


def vit_steps(batch: int, rows: int) -> Contenders:
    """A step of DINO on views that are there: ours with the memory, and lightly's."""
    from _peers import LightlyDino

    config = get_recipe("dino-vit-s16")
    config.pairs = "standard"  # the memory is made here, with a filled cache
    state = build_state(config, rows)
    state.epoch = 1  # in the first, the last layer is frozen
    method: Any = state.method
    memory = NeighborMemory(rows, method.feature_dim, config.neighbors.window, config.neighbors.k)
    fill(memory)
    memory.observe([0], memory.cache[:1])
    memory.end_epoch()
    settings = config.settings
    head = {"hidden_dim": settings.hidden_dim, "bottleneck_dim": settings.bottleneck_dim}
    head["output_dim"] = settings.out_dim
    peer = LightlyDino(method.student.backbone.net, method.teacher.backbone.net, method.feature_dim, head)
    generator = torch.Generator().manual_seed(0)
    views = [torch.randn(batch, 3, 224, 224, generator=generator) for _ in range(2)]
    ids = torch.randperm(rows, generator=generator)[:batch]

    def ours() -> int:
        step = method([view.contiguous(memory_format=torch.channels_last) for view in views], 1)
        learn(state, step.loss, config, steps_per_epoch=1000)
        memory.observe(ids, step.feature)
        return batch

    def lightly() -> int:
        peer.step(views, 1)
        return batch

    return {"adasim, with its memory": ours, "lightly": lightly}


if __name__ == "__main__":
    main()
