"""Evaluations on several processes give the figures of one, and one of the processes speaks and writes for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import adasim
from adasim.data import FolderImages, synthetic
from adasim.dist.processes import Distributed
from adasim.eval.feature_files import Parts
from adasim.eval.features import extract

SIDE = 66  # pixels, too large to be held in memory: loader processes read the files
QUICK: dict[str, Any] = {"data": "synthetic:50", "size": 16, "batch_size": 16, "epochs": 1}


def measured(folder: Path, stage: int) -> dict[str, Any]:
    """What each rank measures of the run in RUN, on the photos in PHOTOS."""
    run, photos = os.environ["RUN"], os.environ["PHOTOS"]
    options: dict[str, Any] = {"data": photos, "no_cache": True, "save": False, "workers": 0}
    with Distributed.start("cpu") as ranks:

        def figures(name: str, **more: Any) -> dict[str, Any]:
            report = adasim.evaluate(run, name, ranks=ranks, **options | more)
            assert bool(report.said) == ranks.is_main
            return report.metrics

        found: dict[str, Any] = {
            "knn": figures("knn", workers=1),
            "linear": figures("linear", epochs=1, rates=0.5),
            "swept": figures("linear", epochs=2, rates=(0.01, 1), quick=True),
            "fewshot": figures("fewshot", episodes=5, ways=2, shots=2, queries=2),
            "segmentation": figures("segmentation", **QUICK),
            "warped segmentation": figures("segmentation", **QUICK, augmented=True),
        }
        # A pass that was interrupted goes on, whoever sees what was kept.
        encoder, images = adasim.load_backbone(run), FolderImages(Path(photos) / "train")
        failed: dict[int, str] = {}
        how: dict[str, Any] = {"batch_size": 64, "unreadable": failed, "progress": False}
        found["features"] = extract(encoder, images, encoder.transform, ranks=ranks, **how)
        if ranks.is_main:
            before = Parts(folder / f"{stage}.parts", "in batches of 64 on cpu")
            before.keep(found["features"], 128, failed)
        ranks.barrier()
        parts = folder / f"{stage}.parts"
        found["resumed"] = extract(encoder, images, encoder.transform, ranks=ranks, parts=parts, **how)
        # Kept once.
        options |= {"no_cache": False, "results": str(folder / f"{stage}.jsonl"), "save": True}
        found["cached"] = [figures("knn", k=20)["top1_k20"] for _ in range(2)]
        ranks.barrier()
        found["lines"] = len((folder / f"{stage}.jsonl").read_text().splitlines())
    return found


def patterns(folder: Path, count: int) -> None:
    """Generated images of two classes as files."""
    for i, pixels in enumerate(synthetic(count, SIDE).images):
        (folder / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.repeat(pixels.numpy()[0][:, :, None], 3, 2)).save(
            folder / "ab"[i % 2] / f"{i}.png"
        )


def test_evaluations_on_1_2_and_4_processes_give_the_same_figures(
    run_ranks: Callable[..., list[list[dict[str, Any]]]], make_run: Callable[..., Path], tmp_path: Path
) -> None:
    run = make_run(size=SIDE)
    for split, count in (("train", 270), ("test", 90)):
        patterns(tmp_path / "photos" / split, count)
    broken = next((tmp_path / "photos" / "train").rglob("*.*"))
    broken.write_bytes(b"<html>")
    env = {"RUN": str(run), "PHOTOS": str(tmp_path / "photos")}
    stages = run_ranks(__file__, "measured", 1, 2, 4, **env)
    [alone], *others = stages
    exact = ("knn", "linear", "swept", "fewshot", "cached", "lines")
    for everyones in ([alone], *others):
        for one in everyones:
            for name in exact:
                assert one[name] == alone[name], (name, len(everyones))
            for name in ("features", "resumed"):
                assert torch.equal(one[name].nan_to_num(), alone["features"].nan_to_num())
            for name in ("segmentation", "warped segmentation"):  # gradients are summed in another order
                for figure, value in alone[name].items():
                    np.testing.assert_allclose(one[name][figure], value, atol=0.2, err_msg=f"{name} {figure}")
            assert one["segmentation"] == everyones[0]["segmentation"]
    assert alone["lines"] == 2
    assert len(list((run / "features").iterdir())) == 2


def test_under_torchrun_one_process_speaks_and_writes_and_says_what_is_wrong(
    torchrun: Callable[..., list[tuple[int, str]]], make_run: Callable[..., Path]
) -> None:
    run = make_run(source="synthetic:64")
    words = ["--standalone", "--nproc-per-node=2", "-m", "adasim", "eval", "knn", str(run), "--device", "cpu"]
    (code, said), (refused, why) = torchrun(words, [*words, "--k", "65"])
    assert (code, said.count("k-NN of run")) == (0, 1), said
    assert refused, why
    assert why.count("k=65 is more than the 64 training images") == 1, why
    assert len((run / "results.jsonl").read_text().splitlines()) == 1
