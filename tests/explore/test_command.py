"""`adasim explore`: what it writes, and what it refuses."""

from __future__ import annotations

import base64
import csv
import itertools
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explore.explored import Explored, explored
from helpers import (
    command,
    fill,
    forked,
    in_one_line,
    json_lines,
    names,
    photos_of_patterns,
    refusal,
    small_disk,
)

import adasim
from adasim.cli.explore import TABLES
from adasim.data import ArrayImages
from adasim.eval.encoder import open_encoder
from adasim.explore.collection import collect
from adasim.explore.lists import tables
from adasim.explore.open import Opened, open_features
from adasim.explore.page import as_json, write_page
from adasim.options import ExploreOptions
from adasim.runs.folder import check_replaceable
from adasim.util.csv import original, read_csv, safe, to_csv
from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Explored:
    return explored(tmp_path_factory.mktemp("small"))


@pytest.fixture
def photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Here are 48 photos of two classes, and features of them."""
    monkeypatch.chdir(tmp_path)
    photos_of_patterns(tmp_path / "photos", "class{c}/{i:02d}.png")
    values = np.random.default_rng(0).normal(size=(48, 8)).astype(np.float32)
    np.savez("mine.npz", features=values)
    return tmp_path / "photos"


EXPLORE = "explore --features mine.npz --data photos"


def opened(file: str, data: str) -> Opened:
    return open_features(Path(file), data, ExploreOptions(), print)


def divided(photos: Path, *splits: str) -> Path:
    """The same photos in each of the splits."""
    for split in splits:
        shutil.copytree(photos, f"divided/{split}")
    return Path("divided")


def flat(photos: Path, folder: str) -> None:
    """The same photos without classes, by their numbers."""
    Path(folder).mkdir()
    for i, path in enumerate(sorted(photos.rglob("*.png"))):
        shutil.copy(path, f"{folder}/{i:02d}.png")


def payload(page: Path) -> dict[str, Any]:
    found = re.search(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.S
    )
    assert found is not None
    return json.loads(found[1])


def test_what_is_not_explored_of_a_divided_folder_is_told(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (divided(photos, "train", "val") / "test").mkdir()
    command("explore --features mine.npz --data divided --out page.html")
    assert "Without the test images: No images" in in_one_line(capsys.readouterr().out)
    assert payload(Path("page.html"))["splits"] == ["train"]
    shutil.copytree(photos, "divided/test", dirs_exist_ok=True)
    np.savez("both.npz", features=np.random.default_rng(0).normal(size=(96, 8)))
    command("explore --features both.npz --data divided --out both.html")
    said = in_one_line(capsys.readouterr().out)
    assert said.count("are not among them") == 1
    assert "its split train; 48 in val/ are not among them" in said


def test_a_run_is_explored_with_its_own_memory_and_test_images(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    command(f"explore {run} --csv {tmp_path / 'lists'} --out {run / 'explore.html'}")
    said = in_one_line(capsys.readouterr().out)
    assert "surprising" in said
    data = payload(run / "explore.html")
    suspects = data["tables"]["wrong-labels"]
    listed = sum(float(row[4]) >= suspects["threshold"] for row in suspects["rows"])
    assert f"Of {len(suspects['rows'])} suspects {listed} score {suspects['threshold']:.2f} or more" in said
    assert (data["count"], data["train"], data["splits"]) == (48 + 256, 48, ["train", "test"])
    assert data["windowed"]
    for name, table in data["tables"].items():
        written = (tmp_path / "lists" / f"{name}.csv").read_bytes().decode()
        assert written == to_csv(table["columns"], table["rows"])
    assert set(data["tables"]) == set(TABLES)
    # The memory never saw a test image: that nobody lists it says nothing.
    assert all(int(row[0]) < 48 for row in data["tables"]["lonely"]["rows"])
    check_replaceable(run)  # what an exploration leaves in a run does not stand in the way of --overwrite


def test_a_row_of_wrong_labels_tells_its_own_numbers(small: Explored) -> None:
    found, table = small.found, small.found.tables["wrong-labels"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    labels = found.findings.labels
    assert labels is not None
    assert [int(row["id"]) for row in rows] == labels.suspects.tolist()
    for row in rows:
        i = int(row["id"])
        assert row["suggested"] == found.collection.classes[int(labels.suggested[i])] != row["label"]
        told = [float(row[name]) for name in ("score", "neighbours_own", "probe_suggested")]
        expected = [labels.score[i], labels.votes[i, 0], labels.probe[i, 1]]
        assert told == pytest.approx([*map(float, expected)], abs=1e-4)
        # Whichever suspect sets the threshold, the page shows it.
        cut = replace(labels, threshold=float(labels.score[i]))
        shown = tables(found.collection, found.support, replace(found.findings, labels=cut))["wrong-labels"]
        assert shown.threshold is not None
        assert float(row["score"]) >= shown.threshold
        assert row["judge"] == labels.judge(i)
    assert rows


def test_classes_of_two_splits_are_matched_by_name() -> None:
    pixels = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    sets = {"a": ["cat", "dog"], "b": ["dog", "emu"]}
    found = collect([ArrayImages(name, pixels, torch.tensor([0, 1]), sets[name]) for name in sets])
    assert found.classes == ["cat", "dog", "emu"]
    assert found.labels is not None
    assert found.labels.tolist() == [0, 1, 1, 2]


def test_any_encoder_explores_any_images_but_those_that_cannot_be_read(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here an untrained one, which needs no network."""
    files = sorted(photos.rglob("*.png"))
    encoder = "--backbone vit_mini --random-weights --size 16 --no-cache --workers 0"
    line = f"explore {encoder} --data photos --passes 2 --k 3"
    files[7].write_bytes(b"torn")
    command(f"{line} --out page.html")
    data = payload(Path("page.html"))
    assert (data["count"], data["unreadable"]) == (48, 1)
    assert "2 augmented passes" in data["origin"]
    for file in files:
        file.write_bytes(b"torn")
    assert "Not one of the 48 images of photos can be read" in refusal(line, capsys)


def test_features_of_somebody_else_and_neighbours_for_embedding_atlas(photos: Path) -> None:
    command(f"{EXPLORE} --out page.html --export-atlas atlas.jsonl --k 5")
    lines = json_lines(Path("atlas.jsonl"))
    values = torch.from_numpy(np.load("mine.npz")["features"]).double()
    unit = values / values.norm(dim=1, keepdim=True)
    for i, line in enumerate(lines):
        cosines = unit @ unit[i]
        cosines[i] = -9
        assert line["id"] == i
        assert line["neighbors"]["ids"] == cosines.topk(5).indices.tolist()
        assert line["neighbors"]["distances"] == sorted(line["neighbors"]["distances"])
        assert abs(sum(1 - d for d in line["neighbors"]["distances"]) - 1) < 1e-4
    assert all(np.isfinite([line["x"], line["y"]]).all() for line in lines)
    assert not payload(Path("page.html"))["windowed"]


def test_findings_are_exported_for_fiftyone_and_cleanlab(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.load("mine.npz")["features"]
    values[3] = np.nan
    np.savez("mine.npz", features=values)
    command(f"{EXPLORE} --csv lists --export-fiftyone images.csv --export-cleanlab labels.npz")
    columns, rows = read_csv(Path("images.csv"))
    assert [Path(row["filepath"]).read_bytes() for row in rows] == [
        path.read_bytes() for path in sorted(photos.rglob("*.png"))
    ]
    assert {"label", "x", "y", "duplicates_group", "wrong_labels_score", "wrong_labels_suggested"} <= set(
        columns
    )
    suspects = {row["id"]: row["score"] for row in read_csv(Path("lists/wrong-labels.csv"))[1]}
    told = {row["id"]: float(row["wrong_labels_score"]) for row in rows if row["wrong_labels_score"]}
    assert told == {i: float(score) for i, score in suspects.items()}
    held = np.load("labels.npz")
    assert held["ids"].tolist() == [i for i in range(48) if i != 3]
    assert np.array_equal(held["features"], values[held["ids"]])
    assert [f"class{label}" for label in held["labels"]] == [name.split("/")[0] for name in held["files"]]
    assert ".npz" in refusal(f"{EXPLORE} --export-cleanlab labels.csv", capsys)
    flat(photos, "flat")
    line = "explore --features mine.npz --data flat --csv more --export-cleanlab more.npz"
    assert "have none" in refusal(line, capsys)


def test_features_that_name_their_images_are_refused_for_others(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (photos / "class0" / "00.png").rename(photos / "class0" / "new\nline.png")
    names = sorted(str(path.relative_to(photos)) for path in photos.rglob("*.png"))
    np.savez("named.npz", features=np.load("mine.npz")["features"], files=np.array(names))
    line = "explore --features named.npz --data photos --out page.html"
    command(line)
    (photos / "class0" / "02.png").rename(photos / "class1" / "zz.png")  # as many, and all rows shifted
    message = refusal(f"{line} --overwrite", capsys)
    assert "is of class0/02.png" in message
    assert "these are features of other images" in message


def test_given_features_that_are_not_finite_are_counted_and_refused_if_all_are(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = np.load("mine.npz")["features"]
    values[3] = np.inf
    np.savez("mine.npz", features=values)
    opened("mine.npz", "photos")
    said = in_one_line(capsys.readouterr().out)
    assert "mine.npz has no features of 1 images, such as class0/06.png: they get no neighbours." in said
    np.savez("mine.npz", features=np.full_like(values, np.nan))
    for verb in ("explore", "gallery"):
        message = refusal(f"{verb} --features mine.npz --data photos", capsys)
        assert "mine.npz has not one row of finite features." in message


def test_names_may_be_bytes(photos: Path) -> None:
    values = np.load("mine.npz")["features"]
    names = sorted(str(path.relative_to(photos)).encode() for path in photos.rglob("*.png"))
    np.savez("named.npz", features=values[::-1], files=np.array(names[::-1]))
    assert torch.equal(opened("named.npz", "photos").features, torch.from_numpy(values))


def test_without_a_label_among_the_features_nothing_is_said_of_labels(photos: Path) -> None:
    shutil.copytree(photos, "mixed/test")
    flat(photos, "mixed/train")
    names = [f"train/{i:02d}.png" for i in range(48)]
    np.savez("named.npz", features=np.load("mine.npz")["features"], files=np.array(names))
    command("explore --features named.npz --data mixed --csv lists")
    assert read_csv(Path("lists/wrong-labels.csv"))[1] == []


def test_a_folder_whose_name_is_not_utf8_is_explored(photos: Path) -> None:
    odd = os.fsdecode(b"caf\xe9")
    shutil.copytree(photos, odd)
    for page, base in ((os.path.join(odd, os.fsdecode(b"p\xe9.html")), "./"), ("p.html", "caf%E9/")):
        command(f"explore --features mine.npz --data {odd} --out {page}")
        assert payload(Path(page))["bases"] == [base]


def test_lists_of_other_images_do_not_stay_behind(photos: Path) -> None:
    command(f"{EXPLORE} --csv lists")
    assert Path("lists/wrong-labels.csv").exists()
    Path("lists/mine.csv").touch()
    flat(photos, "flat")
    command("explore --features mine.npz --data flat --csv lists --overwrite")
    assert not Path("lists/wrong-labels.csv").exists()
    assert Path("lists/mine.csv").exists()


def test_what_embed_writes_of_one_split_is_placed_by_name(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = divided(photos, "train", "test")  # the same names in both
    (folder / "test" / "class0" / "04.png").write_bytes(b"torn")
    encoder = open_encoder("vit_mini", random_weights=True, size=16).backbone
    adasim.embed(encoder, folder, "embedded.npz", split="test", size=16, workers=0, cache=False)
    found = opened("embedded.npz", "divided")
    assert "no features of 49 images" in in_one_line(capsys.readouterr().out)
    names, known = found.collection.names, torch.isfinite(found.features).all(1)
    assert {name for name, has in zip(names, known, strict=True) if has} == {
        name for name in names if name.startswith("test/") and name != "test/class0/04.png"
    }
    written = np.load("embedded.npz")
    last = names.index(f"test/{written['files'][-1]}")
    assert torch.equal(found.features[last], torch.from_numpy(written["features"][-1]))
    assert len(opened("embedded.npz", "divided/test").features) == 48


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["class0/00.png", "class0/02.png"], "such as train/class0/00.png and test/class0"),
        (["train/class0/00.png", "/at/home/train/class0/00.png"], "Rows 0 and 1 of named.npz are both"),
        (["train/class0/00.png"], "One name for each of the 2 rows of features is needed"),
        ([3, 4], "One name for each of the 2 rows"),
        (None, "For training images alone: --data divided/train"),
    ],
)
def test_features_of_which_it_is_not_clear_whose_they_are_are_refused(
    files: list[Any] | None, words: str, photos: Path
) -> None:
    divided(photos, "train", "test")
    named: dict[str, Any] = {} if files is None else {"files": np.array(files)}
    np.savez("named.npz", features=np.eye(2, dtype=np.float32), **named)
    with pytest.raises(UserError, match=re.escape(words)):
        opened("named.npz", "divided")


def test_the_page_counts_supports_and_knows_self_matches_beyond_the_neighbours_that_it_shows(
    small: Explored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("adasim.explore.page.PAGE_SUPPORT", 1)
    write_page(tmp_path / "page.html", small.found)
    data = payload(tmp_path / "page.html")
    listed = np.frombuffer(base64.b64decode(data["listed"]), "<u4")
    own = np.frombuffer(base64.b64decode(data["own"]), "<u2")
    support = small.found.support
    assert data["support"]["width"] == 1
    assert listed.tolist() == small.found.findings.popularity.tolist()
    assert np.allclose(own / 65535, support.self_match().nan_to_num(0.0), atol=1e-4)
    assert (own[(support.neighbours[:, 0] != torch.arange(len(support))).numpy()] > 0).any()


def test_nothing_is_replaced_unasked_and_nothing_foreign_ever(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, both = Path("page.html"), f"{EXPLORE} --out page.html --csv lists"
    command(both)
    before = page.read_bytes()
    assert "--overwrite" in refusal(f"{EXPLORE} --out page.html", capsys)
    assert "--overwrite" in refusal(f"{EXPLORE} --csv lists", capsys)
    again = f"{both} --overwrite"
    page.write_bytes(b"mine")
    assert "no page of adasim explore" in refusal(again, capsys)
    assert page.read_bytes() == b"mine"
    page.write_bytes(before)
    command(again)
    assert page.read_bytes() == before  # the same images, the same page
    beside = Path("page-sheets")
    beside.mkdir()
    (beside / f"sheet-00000.webp.1-ab{TEMPORARY}").touch()  # of a command that was killed
    command(again)
    assert not beside.exists()
    beside.mkdir()
    (beside / "holiday.jpg").touch()
    assert "holiday.jpg" in refusal(again, capsys)
    shutil.rmtree(beside)
    beside.touch()
    assert "page-sheets is a file" in refusal(again, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "What is to be explored"),
        ("RUN --backbone resnet18", "one of them alone"),
        ("--backbone resnet18", "--backbone needs --data"),
        ("photos", "photos is not"),
        ("--data photos --features mine.npz --out page.pdf", ".html"),
        ("--data photos --features mine.npz --out nowhere/page.html", "nowhere"),
        ("--data photos --features short.npz", "40 features and photos 48 images"),
        ("--data photos --features two.npz", "named features"),
        ("--data photos --features thin.npz", "thin.npz holds features (48, 0)"),
        ("--data photos --features photos/class0/00.png", "cannot be read"),
        ("--data photos --features corrupt.npz", "corrupt.npz cannot be read"),
        ("--data photos --features mine.npz --tau 0", "--tau"),
        ("--data photos --features mine.npz --export-atlas atlas.csv", ".jsonl"),
    ],
)
@pytest.mark.usefixtures("photos")
def test_bad_input_gets_one_sentence_and_leaves_nothing(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("short.npz", features=np.zeros((40, 3), dtype=np.float32))
    np.savez("two.npz", a=np.zeros((48, 3)), b=np.zeros((48, 3)))
    np.savez("thin.npz", features=np.zeros((48, 0)))
    np.savez_compressed("corrupt.npz", features=np.random.default_rng(0).random((48, 30)))
    packed = bytearray(Path("corrupt.npz").read_bytes())
    packed[60:200] = b"\xff" * 140
    Path("corrupt.npz").write_bytes(packed)
    assert words in refusal(f"explore {arguments}", capsys)
    assert not list(Path().glob("*.html"))


def test_json_within_a_page_is_ascii_without_brackets() -> None:
    hostile = {"</script><!--": "\u2028&\ud800"}
    text = as_json(hostile)
    assert text.isascii()
    assert not set("<>&").intersection(text)
    assert json.loads(text) == hostile


def test_csv_fields_are_no_formulas_and_come_back_as_they_were(tmp_path: Path) -> None:
    fields = ["=1+1", "+cmd", "-2+3", "@sum", "'quoted", "''", "plain", '"', "a,b", "two\r\nlines"]
    fields += ["-0.5", "7", ""]
    for field in fields:
        written = safe(field)
        assert original(written) == field
        assert written[:1] not in ("=", "+", "@", "\t", "\r", "\n")
        assert written[:1] != "-" or float(written) < 0
    path = tmp_path / "fields.csv"
    path.write_text(to_csv(["a", "b"], [(field, "x") for field in fields]), newline="")
    with open(path, newline="") as file:
        assert [row[0] for row in csv.reader(file)][1:] == [safe(field) for field in fields]
    columns, rows = read_csv(path)
    assert columns == ["a", "b"]
    assert [row["a"] for row in rows] == fields


def test_a_test_copy_of_a_training_image_is_listed_first_and_the_test_image_kept(small: Explored) -> None:
    table = small.found.tables["duplicates"]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    first = [row for row in rows if row["group"] == "1"]
    assert {row["straddles"] for row in first} == {"yes"}
    assert first[0]["file"] == "test/blue/leak.png"
    assert [row["keep"] for row in first] == ["yes"] + ["no"] * (len(first) - 1)
    assert "train/blue/00.png" in {row["file"] for row in first}


def test_an_image_that_cannot_be_read_has_no_thumbnail_and_no_findings_of_its_pixels(small: Explored) -> None:
    (torn,) = [i for i, name in enumerate(small.found.collection.names) if "torn" in name]
    assert set(small.found.looks.unreadable) == {torn}
    assert payload(small.page)["unreadable"] == 1
    assert all(torn not in group.members for group in small.found.findings.groups)


def test_sheets_beside_a_page_go_when_the_page_needs_them_no_more(small: Explored, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert write_page(page, small.found, inline_bytes=1000) == [page, tmp_path / "page-sheets"]
    assert len(list((tmp_path / "page-sheets").iterdir())) == len(small.found.looks.sheets)
    assert payload(page)["sheets"]["inline"] is None
    assert write_page(page, small.found) == [page]
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]
    assert len(payload(page)["sheets"]["inline"]) == len(small.found.looks.sheets)


def test_a_full_disk_is_said_in_a_sentence_and_leaves_the_old_page(
    photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(photos.parent / "disk", "1m") as disk:
        command(f"{EXPLORE} --out disk/page.html")
        before = (disk / "page.html").read_bytes()
        fill(disk / "full")
        assert "No space left" in refusal(f"{EXPLORE} --out disk/page.html --overwrite", capsys)
        assert (disk / "page.html").read_bytes() == before
        assert names(disk) == ["full", "page.html"]


@pytest.mark.slow
@pytest.mark.parametrize("write", [1, 2])
def test_killed_among_its_sheets_a_page_is_as_it_was_and_the_next_one_is_whole(
    small: Explored, tmp_path: Path, write: int
) -> None:
    page = tmp_path / "page.html"
    page.write_text("the page before")
    sync, calls = os.fsync, itertools.count(1)

    def killed_at_this_one(fd: Any) -> None:
        if next(calls) == write:
            os.kill(os.getpid(), signal.SIGKILL)
        sync(fd)

    def killed() -> None:
        os.fsync = killed_at_this_one
        write_page(page, small.found, inline_bytes=1000)

    code, said = forked(killed)
    assert code == -signal.SIGKILL, said
    assert page.read_text() == "the page before"
    write_page(page, small.found, inline_bytes=1000)
    sheets = sorted((tmp_path / "page-sheets").iterdir())
    assert [path.read_bytes() for path in sheets] == small.found.looks.sheets  # and nothing else is left
