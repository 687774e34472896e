"""Verdicts that leave images out of pretraining and evaluation, or correct their labels; no file is ever touched."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import command, photos_of_patterns, refusal

from adasim.api import evaluate, load_run, pretrain
from adasim.config import Config
from adasim.data import describe, leave_out, open_images, relabel
from adasim.data.sources import file_key
from adasim.explore.collection import collect
from adasim.explore.open import open_run
from adasim.options import ExploreOptions
from adasim.util.csv import to_csv
from adasim.util.errors import UserError


def verdicts(path: Path, given: dict[str, str]) -> Path:
    """A file as the page exports it."""
    columns = ["id", "split", "file", "label", "verdict", "new_label", "view"]
    rows = [("0", "train", name, "", verdict, "", "lonely") for name, verdict in given.items()]
    path.write_text(to_csv(columns, rows), newline="")
    return path


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    photos_of_patterns(tmp_path / "photos", "class{c}/{i:02d}.png")
    (tmp_path / "photos" / "class0" / "00.png").rename(tmp_path / "photos" / "class0" / "=odd, \u202e.png")
    return tmp_path / "photos"


def test_rejected_images_are_left_out_and_all_others_stay_as_they_were(photos: Path, tmp_path: Path) -> None:
    whole = open_images(str(photos))
    names = [file_key(whole, i) for i in range(48)]
    odd = "class0/=odd, \\u202e.png"  # as the page shows it
    given = {odd: "reject", "class1/03.png": "reject", "class1/05.png": "keep", "class0/02.png": "unsure"}
    left = leave_out(whole, verdicts(tmp_path / "v.csv", given))
    gone = {"class0/=odd, \u202e.png", "class1/03.png"}
    kept = [i for i in range(48) if names[i] not in gone]
    assert len(left) == len(kept) == 46
    for place, i in enumerate(kept):
        assert left.where(place) == whole.where(i)
        assert torch.equal(left.load(place), whole.load(i))
    assert left.labels is not None
    assert whole.labels is not None
    assert torch.equal(left.labels, whole.labels[kept])
    assert left.fingerprint() != whole.fingerprint()
    assert "2 rejected by verdict" in left.left_out
    assert leave_out(whole, None) is whole
    assert file_key(open_images(f"{photos}//"), 30) == names[30]  # with slashes at its end
    assert sum(path.is_file() for path in photos.rglob("*")) == 48  # nothing was deleted or moved


def test_a_divided_folder_tells_train_and_test_apart(tmp_path: Path) -> None:
    photos_of_patterns(tmp_path / "photos" / "train", "class{c}/{i:02d}.png")
    shutil.copytree(tmp_path / "photos" / "train", tmp_path / "photos" / "test")
    given = verdicts(tmp_path / "v.csv", {"test/class0/02.png": "reject"})
    sets = [open_images(str(tmp_path / "photos"), split=split) for split in ("train", "test")]
    sizes = [len(leave_out(images, given)) for images in sets]
    assert sizes == [48, 47]


def test_verdicts_of_which_no_name_fits_are_said_and_leave_out_nothing(photos: Path, tmp_path: Path) -> None:
    whole = open_images(str(photos))
    given = verdicts(tmp_path / "v.csv", {"train/class1/03.png": "reject", "train/class1/05.png": "reject"})
    left = leave_out(whole, given)
    assert len(left) == 48
    assert left.fingerprint() == whole.fingerprint()
    said = describe(left)
    assert "Left out: none of the 2 rejected by verdict (they are called like train/class1/03.png" in said
    assert "Left out" not in describe(whole)
    assert "Left out" not in describe(leave_out(whole, verdicts(tmp_path / "v.csv", {"a.png": "keep"})))


def test_a_name_that_looks_like_another_one_escaped_is_another_name(photos: Path, tmp_path: Path) -> None:
    (photos / "class0" / "02.png").rename(photos / "class0" / "two\nlines.png")
    (photos / "class0" / "04.png").rename(photos / "class0" / r"two\nlines.png")
    (photos / "class1" / "03.png").rename(photos / "class1" / "next\x85line.png")
    (photos / "class1" / "05.png").rename(os.fsdecode(os.fsencode(photos) + b"/class1/next\x85line.png"))
    whole = open_images(str(photos))
    names = collect([whole]).names
    assert len(set(names)) == 48
    for i, name in enumerate(names):
        left = leave_out(whole, verdicts(tmp_path / "v.csv", {name: "reject"}))
        assert len(left) == 47
        assert whole.where(i) not in {left.where(place) for place in range(47)}


def test_images_in_memory_are_left_out_by_their_number(tmp_path: Path) -> None:
    whole = open_images("synthetic:48", size=16)
    given = verdicts(tmp_path / "v.csv", {file_key(whole, 7): "reject"})
    left = leave_out(whole, given)
    array, all_of_them = left.as_array(), whole.as_array()
    assert array is not None
    assert all_of_them is not None
    assert torch.equal(array, torch.cat([all_of_them[:7], all_of_them[8:]]))


def test_a_run_never_sees_a_rejected_image_and_resumes_with_the_same_ones(
    small: Callable[..., Config], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = verdicts(tmp_path / "v.csv", {"class0/02.png": "reject", "class1/03.png": "reject"})
    config = small(data__source=str(photos), data__exclude=str(given), epochs=2)
    run = pretrain(config, tmp_path / "run")
    assert "46 images" in capsys.readouterr().out
    assert len(load_run(run).images()) == 46
    assert json.loads((run / "config.json").read_text())["data"]["exclude"] == str(given)
    command(f"pretrain --resume {run} --epochs 3 --no-curves --no-compare")
    memory = load_run(run).memory
    assert memory is not None
    assert memory.num_images == 46
    verdicts(given, {"class0/02.png": "reject"})
    assert "other data" in refusal(f"pretrain --resume {run} --epochs 4", capsys)


def test_the_page_of_a_run_leaves_out_the_test_images_that_it_excludes(
    finished: Path, photos: Path, tmp_path: Path
) -> None:
    data, run = tmp_path / "divided", tmp_path / "run"
    for split in ("train", "test"):
        shutil.copytree(photos, data / split)
    shutil.copytree(finished, run)
    given = verdicts(tmp_path / "v.csv", {"train/class0/02.png": "reject", "test/class1/03.png": "reject"})
    config = json.loads((run / "config.json").read_text())
    config["data"] |= {"source": str(data), "exclude": str(given)}
    (run / "config.json").write_text(json.dumps(config))
    (run / "data.json").write_text("{}")  # it has the fingerprint of other images
    shutil.rmtree(run / "checkpoints")  # and their neighbours
    names = open_run(run, ExploreOptions(workers=0, passes=1), print).collection.names
    assert len(names) == 47 + 47
    assert not {"train/class0/02.png", "test/class1/03.png"} & set(names)


def test_an_evaluation_leaves_them_out_too(finished: Path, photos: Path, tmp_path: Path) -> None:
    given = verdicts(tmp_path / "v.csv", {"class0/02.png": "reject"})
    report = evaluate(finished, "knn", data=str(photos), exclude=given, save=False, no_cache=True, workers=0)
    facts: dict[str, Any] = report.results[0].data
    assert facts["train_images"] + facts["test_images"] == 47


def new_labels(path: Path, given: dict[str, str]) -> Path:
    rows = [("0", "train", name, "", "relabel", label, "wrong-labels") for name, label in given.items()]
    path.write_text(
        to_csv(["id", "split", "file", "label", "verdict", "new_label", "view"], rows), newline=""
    )
    return path


def test_new_labels_replace_those_of_the_folders(photos: Path, tmp_path: Path) -> None:
    whole = open_images(str(photos))
    names = [file_key(whole, i) for i in range(48)]
    given = new_labels(
        tmp_path / "v.csv", {"class0/02.png": "class1", "class1/03.png": "rare", "class1/05.png": ""}
    )
    changed = relabel(whole, given)
    assert whole.labels is not None
    assert changed.labels is not None
    assert changed.classes == [*whole.classes, "rare"]
    expected = [whole.classes[label] for label in whole.labels.tolist()]
    expected[names.index("class0/02.png")] = "class1"
    expected[names.index("class1/03.png")] = "rare"
    assert [changed.classes[label] for label in changed.labels.tolist()] == expected
    assert "2 have new labels by verdict" in describe(changed)
    assert changed.fingerprint() != whole.fingerprint()
    assert len(whole.classes) == 2  # the other one is as it was
    elsewhere = relabel(whole, new_labels(tmp_path / "v.csv", {"train/class0/02.png": "class1"}))
    assert "None of 1 new labels is used" in describe(elsewhere)
    assert elsewhere.fingerprint() == whole.fingerprint()


def test_new_labels_are_the_first_ones_of_images_that_had_none(tmp_path: Path) -> None:
    photos_of_patterns(tmp_path / "photos", "{c}{i:02d}.png")
    whole = open_images(str(tmp_path / "photos"))
    changed = relabel(whole, new_labels(tmp_path / "v.csv", {file_key(whole, 5): "cat"}))
    assert whole.labels is None
    assert changed.labels is not None
    assert changed.classes == ["cat"]
    assert changed.labels.tolist() == [0 if i == 5 else -1 for i in range(48)]


def test_a_run_takes_new_labels_and_its_resume_refuses_others(
    small: Callable[..., Config], photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = new_labels(tmp_path / "v.csv", {"class0/02.png": "class1"})
    run = pretrain(small(data__source=str(photos), data__labels=str(given), epochs=2), tmp_path / "run")
    assert "1 has a new label by verdict" in capsys.readouterr().out
    labels, folders = load_run(run).images().labels, open_images(str(photos)).labels
    assert labels is not None
    assert folders is not None
    assert (labels != folders).sum() == 1
    command(f"pretrain --resume {run} --epochs 3 --no-curves")  # with the table of its stages
    page = open_run(run, ExploreOptions(workers=0), print).collection
    assert page.labels is not None
    assert torch.equal(page.labels, labels)
    new_labels(given, {"class0/04.png": "class1"})
    assert "the labels differ" in refusal(f"pretrain --resume {run} --epochs 4", capsys)
    missing = f"pretrain desk-vit --data synthetic:48 --labels {tmp_path}/no.csv --out {tmp_path}/other"
    assert "--labels" in refusal(missing, capsys)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a,b\r\n1,2\r\n", "no list of verdicts"),
        (b"file,verdict\r\na.png,leave out\r\n", "Verdicts are reject"),
        (b"\xff\xfe", "not UTF-8"),
        (None, "No such file"),
        (b'id,file,verdict\r\n0,"open', "not a CSV file"),
    ],
)
def test_a_file_that_is_no_list_of_verdicts_is_refused_before_anything_begins(
    content: bytes | None, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "v.csv"
    if content is not None:
        path.write_bytes(content)
    out = tmp_path / "run"
    assert words in refusal(f"pretrain desk-vit --data synthetic:48 --exclude {path} --out {out}", capsys)
    assert not out.exists()


def test_a_spreadsheets_semicolons_are_read_and_rejecting_everything_is_refused(
    photos: Path, tmp_path: Path
) -> None:
    whole, path = open_images(str(photos)), tmp_path / "v.csv"
    path.write_bytes("\ufeffid;file;verdict\r\n0;class0/02.png;reject\r\n".encode())
    assert len(leave_out(whole, path)) == 47
    names = {name: "reject" for name in collect([whole]).names}
    with pytest.raises(UserError, match="reject all 48 images"):
        leave_out(whole, verdicts(path, names))
