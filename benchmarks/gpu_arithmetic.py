"""What a step of each paper recipe should take on a node of eight A100: counted and divided, not measured.

    python benchmarks/gpu_arithmetic.py          # seconds, on any machine

Operations and bytes are counts (`Footprint`, `Plan`). Operations are divided by the A100's published rates (312
TFLOP/s in fp16 and bf16, 156 in TF32, 19.5 in fp32) times the share of them that networks reach, which is a guess:
0.3 for ViTs, 0.2 for ResNets in 16 bits and TF32, 0.7 in fp32. --images-per-core
is by results/views_photos.md. docs/gpu.md explains the table, and has the search's.
"""

from __future__ import annotations

from dataclasses import replace

from _report import options, report

from adasim.recipes import get_recipe
from adasim.tools.plan import Plan
from adasim.train.budget import Footprint

IMAGES, RANKS = 1_281_167, 8
PEAK = {"fp32": 19.5e12, "TF32": 156e12, "16 bits": 312e12}
REACHED = {"vit": 0.3, "resnet": 0.2, "fp32": 0.7}


def main() -> None:
    args = options(__doc__, images_per_core=422)
    rows = [
        row(name, args.images_per_core)
        for name in ("simsiam-resnet50", "dino-resnet50", "dino-vit-s16", "dino-vit-b16")
    ]
    settings = {"images": IMAGES, "ranks": RANKS, "device": "A100 40 GB (derived, not measured)"}
    report("gpu_arithmetic", settings | {"images per core": round(args.images_per_core)}, rows)


def row(recipe: str, images_per_core: float) -> dict[str, object]:
    """One recipe on one of the eight GPUs."""
    config = get_recipe(recipe)
    share = config.batch_size // RANKS
    full, mixed = (Footprint.count(replace(config, precision=p)) for p in ("fp32", "bf16"))
    kind = REACHED["vit" if config.model.name.startswith("vit") else "resnet"]
    steps = {
        name: full.flops(share) / ((REACHED["fp32"] if name == "fp32" else kind) * peak)
        for name, peak in PEAK.items()
    }
    width = {"resnet50": 2048, "vit_small": 384, "vit_base": 768}[config.model.name]
    plan = Plan(IMAGES, width, RANKS, config.neighbors.window, config.neighbors.k, config.batch_size)
    needed = share / steps["16 bits"]
    return {
        "recipe": recipe,
        "its precision": config.precision,
        "images per GPU": share,
        "TFLOP": full.flops(share) / 1e12,
        "ms in fp32": 1e3 * steps["fp32"],
        "TF32": 1e3 * steps["TF32"],
        "16 bits": 1e3 * steps["16 bits"],
        "images/s and GPU in 16 bits": round(needed),
        "loader cores per GPU": needed / images_per_core,
        "MB/s to the GPU": needed * 2 * 3 * config.views.size**2 / 1e6,
        "GB in fp32": full.training_bytes(share) / 1e9,
        "GB in 16 bits": mixed.training_bytes(share) / 1e9,
        "GB of cache": plan.cache_bytes / 1e9,
    }


if __name__ == "__main__":
    main()
