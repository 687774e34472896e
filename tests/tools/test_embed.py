"""Features of a folder as a file, and the images most similar to one."""

from __future__ import annotations

import csv
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import command, forked, names, refusal
from PIL import Image
from torch.nn.functional import normalize

import adasim
from adasim.data.image_folder import open_folder
from adasim.eval import evaluation, features
from adasim.models import BACKBONE_FILE, load_backbone, save_backbone
from adasim.registry import SOURCES
from adasim.tools.embed import Embedding, contact_sheet


@pytest.fixture
def run(make_run: Callable[..., Path]) -> Path:
    return make_run()


def one_by_one(run: Path, photos: Path) -> dict[str, torch.Tensor]:
    """The oracle: each photo alone through the encoder and its transform."""
    encoder = load_backbone(run)
    with torch.no_grad():
        return {
            str(path.relative_to(photos)): encoder(encoder.transform(Image.open(path))[None])[0]
            for path in sorted(photos.rglob("*.png"))
        }


def agrees(found: Embedding, expected: dict[str, torch.Tensor]) -> bool:
    wanted = torch.stack([expected[name] for name in found.files])
    return len(found) == len(expected) and torch.allclose(found.features, wanted, atol=1e-5)


@pytest.fixture(params=["nan", "large"])
def diverged(run: Path, request: pytest.FixtureRequest) -> Path:
    """A run whose encoder gives features that are not finite."""
    encoder = load_backbone(run)
    with torch.no_grad():
        value = float("nan") if request.param == "nan" else 1e38
        next(encoder.net.parameters()).fill_(value)
    save_backbone(run / BACKBONE_FILE, encoder)
    return run


@pytest.mark.parametrize(
    "line",
    [
        "embed {run} --data {photos} --out {out}/f.npz",
        "similar {run} {photos}/a/00.png --in {photos} --no-picture",
        "eval knn {run} --data {photos}",
        "eval linear {run} --data {photos}",
        "eval fewshot {run} --data {photos}",
        "eval views {run} --data {photos}",
        "gallery --backbone {run} --data {photos} --out {out}/g.png",
        "explore --backbone {run} --data {photos} --out {out}/e.html",
    ],
)
def test_features_that_are_not_finite_are_refused_by_every_command_with_the_cause(
    diverged: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    if not line.startswith("eval"):
        (photos / "a" / "broken.png").write_bytes(b"no image")  # its row is NaN by design, and does not count
    words = line.format(run=diverged, photos=photos, out=tmp_path)
    said = refusal(f"{words} --workers 0 --no-cache", capsys)
    assert "resnet_tiny gives features that are not finite for 12 of 12 images: " in said
    assert "its weights are finite, so" in said or "not finite either, such as conv1.0.weight." in said
    assert not (tmp_path / "f.npz").exists()


@pytest.mark.parametrize("ending", ["npz", "parquet", "npy"])
def test_every_kind_of_file_holds_each_images_own_feature_its_name_and_label(
    ending: str, run: Path, photos: Path, tmp_path: Path
) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    out = tmp_path / f"features.{ending}"
    command(f"embed {run} --data {photos} --out {out} --workers 0")
    if ending == "npz":
        held = np.load(out)  # without pickles
        values, files = held["features"], held["files"].tolist()
        labels = held["classes"][held["labels"]].tolist()
    elif ending == "parquet":
        import pyarrow.parquet

        table = pyarrow.parquet.read_table(out)
        values, files = np.stack(table["features"].to_numpy()), table["file"].to_pylist()
        labels = table["label"].to_pylist()
        assert b"0.4" in table.schema.metadata[b"transform"]
    else:
        values = np.load(out)
        rows = list(csv.DictReader(out.with_suffix(".csv").open()))
        files, labels = [row["file"] for row in rows], [row["label"] for row in rows]
    assert values.dtype == np.float32
    assert agrees(Embedding(torch.from_numpy(values), files, None, [], {}), one_by_one(run, photos))
    assert labels == [name[0] for name in files]


def test_kinds_of_data_of_ones_own_are_embedded_and_searched(
    run: Path, photos: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = lambda name, *, size, split, seed: open_folder(name, split)  # noqa: E731
    monkeypatch.setitem(SOURCES._things, "mine", opened)
    command(f"embed {run} --data mine:{photos} --out {tmp_path / 'x.npz'} --workers 0")
    assert len(np.load(tmp_path / "x.npz")["files"]) == 12
    command(f"similar {run} {photos}/b/03.png --in mine:{photos} --no-picture --workers 0")
    assert "a/0" in capsys.readouterr().out
    assert "No plug-in at no.py" in refusal(f"export {run} --to pt2 --plugin no.py", capsys)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images were encoded at a time; a pass goes over them in fives."""
    real, encode, seen = evaluation.cached_features, features.encode, []

    def counted(backbone: Any, views: torch.Tensor, kind: Any = "pooled") -> torch.Tensor:
        seen.append(len(views))
        return encode(backbone, views, kind)

    monkeypatch.setattr(evaluation, "cached_features", lambda *a, **o: real(*a, **o | {"batch_size": 5}))
    monkeypatch.setattr(features, "encode", counted)
    return seen


def test_a_killed_pass_goes_on_where_it_stopped_and_gives_the_same_bytes(
    run: Path, photos: Path, tmp_path: Path, seen: list[int]
) -> None:
    (photos / "a" / "02.png").write_bytes(b"no image")  # in the part that is kept
    whole = adasim.embed(run, photos, tmp_path / "whole.npz", workers=0, cache=False)
    assert seen == [4, 5, 2]
    assert len(whole.unreadable) == 1
    seen.clear()
    encode = features.encode

    def dies_in_the_third_batch(*arguments: Any) -> torch.Tensor:
        if len(seen) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return encode(*arguments)

    def killed() -> None:
        features.SAVE_S = 0.0  # after every batch
        setattr(features, "encode", dies_in_the_third_batch)  # noqa: B010 - mypy allows no assignment
        adasim.embed(run, photos, workers=0)

    assert forked(killed)[0] == -signal.SIGKILL
    (parts,) = (run / "features").iterdir()
    assert len(names(parts)) == 2
    adasim.embed(run, photos, tmp_path / "again.npz", workers=0)
    assert seen == [2]
    assert (tmp_path / "again.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
    assert [path.suffix for path in (run / "features").iterdir()] == [".safetensors"]
    adasim.embed(run, photos, tmp_path / "third.npz", workers=0)
    assert seen == [2]  # made once


def test_images_that_cannot_be_read_or_were_rejected_are_left_out_and_named(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a/02.png", "b/07.png"):
        (photos / name).write_bytes(b"no image")
    verdicts = tmp_path / "verdicts.csv"
    verdicts.write_text("file,verdict\na/00.png,reject\nb/01.png,keep\n")
    asked = f"--workers 0 --exclude {verdicts}"
    command(f"embed {run} {asked} --data {photos} --out {tmp_path / 'f.npz'}")
    said = capsys.readouterr().out
    for words in (
        "1 rejected by verdict",
        "2 images cannot be read and are left out",
        "features of 9 images",
    ):
        assert words in said
    files = np.load(tmp_path / "f.npz")["files"].tolist()
    assert len(files) == 9
    assert "a/00.png" not in files
    assert adasim.embed(run, photos, workers=0, exclude=str(verdicts)).files == files
    command(f"similar {run} {photos}/b/01.png {asked} --in {photos} -k 12 --no-picture")
    assert "a/00.png" not in capsys.readouterr().out


def test_bad_output_is_refused_before_any_work(
    run: Path, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"embed {run} --data {photos} --out {tmp_path}"
    assert "There is no folder" in refusal(f"{line}/no/f.npz", capsys)
    (tmp_path / "f.csv").write_text("mine")
    assert "f.csv is there already" in refusal(f"{line}/f.npy", capsys)
    assert (tmp_path / "f.csv").read_text() == "mine"
    assert not (run / "features").exists()
    command(f"{line}/f.npy --overwrite --workers 0")
    assert (tmp_path / "f.csv").read_text().startswith("file,label\n")


def test_no_name_in_the_list_beside_the_features_is_a_formula(
    run: Path, photos: Path, tmp_path: Path
) -> None:
    os.rename(photos / "a" / "00.png", os.fsencode(photos) + b'/a/caf\xe9, "x".png')  # no UTF-8
    (photos / "b").rename(photos / "=1+1")
    for ending in ("npz", "npy", "parquet"):
        if ending == "parquet":
            pytest.importorskip("pyarrow")
        adasim.embed(run, photos, tmp_path / f"f.{ending}", workers=0)
    with (tmp_path / "f.csv").open(errors="surrogateescape") as file:
        rows = list(csv.DictReader(file))
    assert {"file": "'=1+1/03.png", "label": "'=1+1"} in rows
    assert 'a/caf\udce9, "x".png' in [row["file"] for row in rows]
    assert 'a/caf\udce9, "x".png' in np.load(tmp_path / "f.npz")["files"].tolist()


def test_the_most_similar_are_those_of_a_brute_force(run: Path, photos: Path, tmp_path: Path) -> None:
    alone = one_by_one(run, photos)
    query = photos / "b" / "03.png"
    scores = {
        name: float(normalize(f, dim=0) @ normalize(alone["b/03.png"], dim=0)) for name, f in alone.items()
    }
    wanted = sorted((name for name in scores if name != "b/03.png"), key=lambda name: -scores[name])
    found = adasim.similar(run, query, photos, k=4, workers=0)
    assert found.files == wanted[:4]
    assert found.scores == pytest.approx([scores[name] for name in wanted[:4]], abs=1e-5)
    copy = tmp_path / "copy.png"
    copy.write_bytes(query.read_bytes())
    assert adasim.similar(run, copy, photos, k=1, workers=0).files == ["b/03.png"]  # the same image
    with Image.open(query) as image:
        assert adasim.similar(run, image, photos, k=1, workers=0).scores == pytest.approx([1.0], abs=1e-5)
    assert len(adasim.similar(run, query, photos, k=50, workers=0)) == 11


def test_similar_prints_a_table_draws_a_picture_and_uses_what_embed_kept(
    run: Path, photos: Path, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    adasim.embed(run, photos, workers=0)
    monkeypatch.setattr("adasim.eval.features.extract", None)  # another pass would break here
    monkeypatch.chdir(tmp_path)
    line = f"similar {run} {photos}/b/03.png --in {photos} -k 3"
    command(line)
    said = capsys.readouterr().out
    found = adasim.similar(run, photos / "b" / "03.png", photos, k=3)
    for name, score in zip(found.files, found.scores, strict=True):
        assert name in said
        assert f"{score:.4f}" in said
    command(line)
    assert {"03-similar.png", "03-similar-2.png"} <= set(names(tmp_path))  # nothing is overwritten
    command(f"{line} --overwrite")
    assert "03-similar-3.png" not in names(tmp_path)
    with Image.open("03-similar.png") as picture:
        assert picture.format == "PNG"
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 24) or []}
        assert len(colours) > 1000  # photos, not only captions
    Path("mine.png").write_text("mine")
    assert "is there already" in refusal(f"{line} --out mine.png", capsys)
    assert "must end in .png" in refusal(f"{line} --out mine.jpg", capsys)
    assert f"{photos} is a folder" in refusal(f"similar {run} {photos} --in {photos}", capsys)


def test_a_sheet_of_one_answer_that_vanished_is_drawn_whatever_the_names(
    run: Path, photos: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    name = "\U0001f408\u732b\u0915 too long for its room, and no $\\frac$ to be set.png"  # letters that no font has
    found = adasim.similar(run, (photos / "b" / "03.png").rename(photos / "b" / name), photos, k=1, workers=0)
    (photos / found.files[0]).unlink()
    contact_sheet(tmp_path / "sheet.png", found, name)
    with Image.open(tmp_path / "sheet.png") as picture:
        assert picture.width > picture.height
    assert [str(one.message) for one in recwarn if "font" in str(one.message)] == []
