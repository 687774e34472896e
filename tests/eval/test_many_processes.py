"""Evaluations on several processes give the figures of one, and one of the processes speaks and writes for all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import adasim
from adasim.data import FolderImages, synthetic
from adasim.dist.processes import Distributed
from adasim.eval.features import _Parts, extract, read_features

SIDE = 66  # pixels, too large to be held in memory: loader processes read the files
QUICK: dict[str, Any] = {"data": "synthetic:50", "size": 16, "batch_size": 16, "epochs": 1}


def measured(folder: Path, stage: int) -> dict[str, Any]:
    """What each rank measures of the run in RUN, on the photos in PHOTOS."""
    run, photos = folder / f"run-{stage}", os.environ["PHOTOS"]
    with Distributed.start("cpu") as ranks:
        if ranks.is_main:
            shutil.copytree(os.environ["RUN"], run)
        ranks.barrier()

        def figures(name: str, **options: Any) -> dict[str, Any]:
            options = {"data": photos, "workers": 0} | options
            report = adasim.evaluate(run, name, ranks=ranks, **options)
            assert bool(report.said) == ranks.is_main
            return report.metrics

        found: dict[str, Any] = {
            "knn": figures("knn", workers=1),
            "again": figures("knn"),  # from the cache
            "linear": figures("linear", epochs=1, rates=0.5),
            "swept": figures("linear", epochs=2, rates=(0.01, 1), quick=True),
            "segmentation": figures("segmentation", **QUICK),
            "warped segmentation": figures("segmentation", **QUICK, augmented=True),
        }
        # A pass that was interrupted goes on, whoever sees what was kept.
        encoder, images = adasim.load_backbone(run), FolderImages(Path(photos) / "train")
        kept = [read_features(path) for path in sorted((run / "features").iterdir())]
        features, failed = next(one for one in kept if one is not None and len(one[0]) == len(images))
        if ranks.is_main:
            _Parts(folder / f"{stage}.parts", "in batches of 64 on cpu").save(features, 128, failed)
        ranks.barrier()
        how: dict[str, Any] = {"batch_size": 64, "unreadable": {}, "parts": folder / f"{stage}.parts"}
        found["resumed"] = extract(encoder, images, encoder.transform, ranks=ranks, **how).nan_to_num()
        found["kept"] = [one and (one[0].nan_to_num().tolist(), one[1]) for one in kept]
        found["lines"] = len((run / "results.jsonl").read_text().splitlines())
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
    [alone] = stages[0]
    for one in (one for everyones in stages for one in everyones):
        for name in ("knn", "linear", "swept", "kept", "lines"):
            assert one[name] == alone[name], name
        assert one["again"] == one["knn"]
        assert torch.equal(one["resumed"], alone["resumed"])
        for name in ("segmentation", "warped segmentation"):  # gradients are summed in another order
            for figure, value in alone[name].items():
                np.testing.assert_allclose(one[name][figure], value, atol=0.2, err_msg=f"{name} {figure}")
    assert alone["lines"] == 6
    assert len(alone["kept"]) == 4  # two views of two splits


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
