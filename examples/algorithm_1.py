"""AdaSim's Algorithm 1 with DINO, top to bottom: no memory class, no loader, no options. Takes seconds.

    python examples/algorithm_1.py              # partners from the epochs before, as in the released code
    python examples/algorithm_1.py current      # from a window that includes this epoch, as printed in the paper

From the package come the networks, the views of an image, and the names of random numbers. Everything else is written
out as plainly as it goes. `adasim.pretrain` does the same, only faster: a test compares the two, step by step.
"""

import math
import sys

import torch
from torch import Tensor
from torch.nn.functional import normalize

from adasim.config import Config, DataConfig, ModelConfig, NeighborsConfig, OptimConfig, ViewsConfig
from adasim.data import BatchedViews, open_images
from adasim.methods import Dino, DinoSettings, build_method
from adasim.util.seeding import key, permutation, uniform

Lists = dict[int, dict[int, float]]
"""Of one epoch: image -> its K nearest images -> similarity."""


def algorithm_1(config: Config) -> tuple[list[float], list[list[int]], Dino, Tensor]:
    """Train; returns the loss and the partners of each step, the networks, and the feature cache Z."""
    seed, B, dino, optim = config.seed, config.batch_size, config.settings, config.optim
    w, K, tau = config.neighbors.window, config.neighbors.k, config.neighbors.tau
    current = config.neighbors.timing == "current"
    images = open_images(config.data.source, size=config.views.size).as_array()  # (N, 3, H, W)
    assert images is not None
    N = len(images)
    steps = N // B  # of an epoch
    total, warmup = config.epochs * steps, optim.warmup_epochs * steps

    method = build_method(config, config.views.size)
    assert isinstance(method, Dino)
    student, teacher = method.student.train(), method.teacher.train()
    center = torch.zeros(dino.out_dim)
    learned = [(name, p) for name, p in student.named_parameters() if p.requires_grad]
    decayed = [p for name, p in learned if p.ndim > 1 and not name.endswith("bias")]
    spared = [p for name, p in learned if p.ndim == 1 or name.endswith("bias")]
    # The package's kernel, to the bit: a key bias has no gradient but rounding, which Adam makes as large as any.
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": spared}], fused=True)

    Z = torch.zeros(N, method.feature_dim, dtype=torch.float64)  # each image's feature when it was last seen
    history: list[Lists] = []  # of the epochs that are over

    def observe(ids: list[int], features: Tensor, lists: Lists) -> None:
        """Find the K nearest images of each one in the batch, and only then write the batch into Z."""
        unit = normalize(features.double(), dim=1)
        for i, row in zip(ids, unit @ Z.T, strict=True):
            similarity = row.float().tolist()
            nearest = sorted(range(N), key=lambda j: (-similarity[j], j))[:K]
            lists[i] = {
                j: round(min(similarity[j], 1.0) * 2**24) / 2**24 for j in nearest
            }  # exact sums below
        Z[ids] = unit

    def draw(i: int, epoch: int, window: list[Lists]) -> int:
        """The partner of image i: drawn from p_win if its own best match is itself, else itself."""
        if epoch < w:
            return i
        m_win: dict[int, float] = {}
        for lists in window:
            for j, similarity in lists.get(i, {}).items():
                m_win[j] = m_win.get(j, 0.0) + similarity / w
        support = sorted(m_win, key=lambda j: (-m_win[j], j))[:K]
        if support[0] != i:
            return i
        weights = [
            math.exp(m_win[j] / tau) for j in support
        ]  # softmax(m_win / tau), not yet divided by its sum
        u = float(uniform(seed, "partner", epoch, torch.tensor([i]))) * sum(weights)
        for j, weight in zip(support, weights, strict=True):
            u -= weight
            if u < 0:
                return j
        return support[-1]

    def view(number: int, shown: list[int], batch: Tensor, epoch: int) -> Tensor:
        return BatchedViews(config.views)(images[shown], number, seed, epoch, batch)

    losses, all_partners = [], []
    for epoch in range(config.epochs):
        order = permutation(seed, "order", epoch, N)
        lists: Lists = {}
        changed = 0  # partners that are another image
        for b in range(steps):
            step = epoch * steps + b
            batch = order[b * B : (b + 1) * B]
            ids = batch.tolist()
            torch.manual_seed(key(seed, "step", step))  # for stochastic depth

            # Draw, views, forward
            x1 = view(1, ids, batch, epoch)
            if not current:
                partners = [draw(i, epoch, history[-w:]) for i in ids]
                x = torch.cat([x1, view(2, partners, batch, epoch)])  # batch norm sees both views
                with torch.no_grad():
                    features = teacher.backbone(x)
                    t1, t2 = teacher.head(features).chunk(2)
                s1, s2 = student.head(student.backbone(x)).chunk(2)
            else:
                with torch.no_grad():
                    features = teacher.backbone(x1)
                    t1 = teacher.head(features)
                observe(ids, features, lists)
                partners = [draw(i, epoch, [*history, lists][-w:]) for i in ids]
                s1 = student.head(student.backbone(x1))
                x2 = view(2, partners, batch, epoch)
                with torch.no_grad():
                    t2 = teacher.head(teacher.backbone(x2))
                s2 = student.head(student.backbone(x2))

            # Loss: each view's student predicts the other view's teacher, which is sharpened and centred
            warm, start = dino.teacher_temp_warmup_epochs, dino.teacher_temp_start
            T = (
                dino.teacher_temp
                if epoch >= warm
                else start + (dino.teacher_temp - start) * epoch / (warm - 1)
            )
            p1, p2 = (((t - center) / T).softmax(1) for t in (t1, t2))
            q1, q2 = ((s / dino.student_temp).log_softmax(1) for s in (s1, s2))
            loss = ((-p1 * q2).sum(1).mean() + (-p2 * q1).sum(1).mean()) / 2
            center = dino.center_momentum * center + (1 - dino.center_momentum) * torch.cat([t1, t2]).mean(0)

            # Step: the student by gradient, the teacher towards the student
            peak = optim.lr * B / 256
            lr = peak * step / (warmup - 1)
            if step >= warmup:
                lr = optim.min_lr + (peak - optim.min_lr) * half_cosine((step - warmup) / (total - warmup))
            turn = half_cosine(step / total)
            decay = optim.weight_decay_end + (optim.weight_decay - optim.weight_decay_end) * turn
            for group, weight_decay in zip(optimizer.param_groups, (decay, 0.0), strict=True):
                group["lr"], group["weight_decay"] = lr, weight_decay
            optimizer.zero_grad()
            loss.backward()
            if epoch < dino.freeze_last_layer_epochs:
                for parameter in student.head.last_layer.parameters():
                    parameter.grad = None
            optimizer.step()
            momentum = 1 - (1 - dino.teacher_momentum) * turn
            with torch.no_grad():
                for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                    slow.mul_(momentum).add_(fast, alpha=1 - momentum)

            if not current:
                observe(ids, features[:B], lists)  # view 1's
            changed += sum(i != j for i, j in zip(ids, partners, strict=True))
            losses.append(loss.item())
            all_partners.append(partners)

        history.append(lists)  # end of epoch
        mean = sum(losses[-steps:]) / steps
        print(
            f"epoch {epoch + 1}: loss {mean:.3f}, {changed / (steps * B):.0%} of the partners are another image"
        )
    return losses, all_partners, method, Z


def half_cosine(share: float) -> float:
    """From 1 to 0 while `share` goes from 0 to 1."""
    return (1 + math.cos(math.pi * share)) / 2


if __name__ == "__main__":
    algorithm_1(
        Config(
            epochs=6,
            batch_size=16,
            data=DataConfig(source="synthetic:128"),
            views=ViewsConfig(
                size=16, scale=(0.8, 1.0), color=0.0, blur=0.0
            ),  # mild: a new encoder knows them again
            model=ModelConfig(name="vit_mini", patch_size=8),
            settings=DinoSettings(out_dim=64, hidden_dim=64, bottleneck_dim=32, teacher_temp_warmup_epochs=2),
            neighbors=NeighborsConfig(
                window=2, k=5, timing="current" if "current" in sys.argv else "previous"
            ),
            optim=OptimConfig(lr=0.02, warmup_epochs=1),
        )
    )
