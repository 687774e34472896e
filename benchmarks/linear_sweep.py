"""What a sweep of ten learning rates costs, in units of one rate.

    python benchmarks/linear_sweep.py                           # features of CIFAR's size, and a stream
    python benchmarks/linear_sweep.py --images 5000 --epochs 1  # a quick try

On cached features the heads are all the work there is, and the ratio grows with the classes towards ten. In a
stream a backbone makes the features anew in each epoch, and ten rates share its pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from _report import options, report, seconds
from timm import create_model
from torch import Tensor

from adasim.eval import linear_probe
from adasim.options import SWEEP


def main() -> None:
    args = options(__doc__, images=50_000, epochs=3, batch_size=1024, stream_images=512, repeats=3)

    rows = []
    for dim, classes in [(384, 10), (1536, 10), (384, 100)]:
        labels = torch.arange(args.images) % classes
        features = torch.randn(classes, dim)[labels] + torch.randn(args.images, dim)
        held_out = features[: args.images // 5], labels[: args.images // 5]

        cached = partial(
            linear_probe, features, labels, *held_out, epochs=args.epochs, batch_size=args.batch_size
        )
        one, ten = (seconds(partial(cached, rates=rates), args.repeats) for rates in (SWEEP[:1], SWEEP[:10]))
        rows.append(row("cached", dim, classes, one, ten))

    # ViT-Ti/16 at 224 pixels, a sixth of ViT-S's work; 1000 classes, where the heads weigh most.
    backbone = create_model("vit_tiny_patch16_224", num_classes=0).eval()
    width = backbone(torch.zeros(1, 3, 224, 224)).shape[1]
    images = torch.randn(args.stream_images, 3, 224, 224)
    labels = torch.arange(args.stream_images) % 1000

    @torch.inference_mode()
    def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        for ids in torch.arange(len(images)).split(64):
            yield backbone(images[ids].flip(-1)), labels[ids]

    held_out = torch.randn(1000, width), torch.arange(1000)
    stream = partial(linear_probe, batches, None, *held_out, num_classes=1000, epochs=1, batch_size=64)
    one, ten = (seconds(partial(stream, rates=rates), args.repeats) for rates in (SWEEP[:1], SWEEP[:10]))
    rows.append(row("ViT-Ti stream", width, 1000, one, ten))
    report("linear_sweep", vars(args), rows)


def row(mode: str, dim: int, classes: int, one: float, ten: float) -> dict[str, str | int | float]:
    return {
        "features": mode,
        "width": dim,
        "classes": classes,
        "1 rate s": one,
        "10 rates s": ten,
        "ratio": ten / one,
    }


if __name__ == "__main__":
    main()
