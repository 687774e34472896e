"""What a run says about its data, what it keeps of them, and which data it goes on with."""

import csv
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers import photos_of_patterns, refusal
from pretrainings import small

from adasim.api import pretrain
from adasim.cli.main import main
from adasim.data import FolderImages
from adasim.runs.metrics import list_unreadable
from adasim.util.errors import UserError


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """48 pictures of 16 pixels in two classes, as files of one size."""
    photos_of_patterns(tmp_path / "photos", "class{c}/{i:02d}.bmp")
    return tmp_path / "photos"


def test_what_was_found_and_left_out_is_said_before_training(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i in range(9):
        (photos / "class0" / f"{i}.CR2").write_bytes(b"?")
    os.mkfifo(photos / "class1" / "pipe.jpg")  # reading it would take for ever
    pretrain(small(epochs=2, data__source=str(photos)), tmp_path / "run")
    said = capsys.readouterr().out
    assert said.startswith(f"48 images in 2 classes (class0, class1) from {photos}. Left out: 9 .cr2")
    assert "1 pipe, socket or device" in said.splitlines()[0]


def test_data_with_other_contents_of_the_same_sizes_are_refused(tmp_path: Path, photos: Path) -> None:
    config = small(epochs=2, data__source=str(photos))
    pretrain(config, tmp_path / "run")
    a, b = photos / "class0" / "04.bmp", photos / "class0" / "06.bmp"
    time = a.stat().st_mtime_ns
    os.utime(b, ns=(time, time))
    aside = tmp_path / "aside"

    def swap() -> None:
        a.rename(aside)
        b.rename(a)
        aside.rename(b)

    swap()
    with pytest.raises(UserError, match=r"Cannot resume with other data: .*class0/04\.bmp, .*class0/06\.bmp"):
        pretrain(config, tmp_path / "run", resume=True)
    swap()
    pretrain(config, tmp_path / "run", resume=True)
    for path in photos.rglob("*.bmp"):
        head = path.read_bytes()[:54]
        path.write_bytes(head + bytes(path.stat().st_size - len(head)))  # black
    with pytest.raises(UserError, match="48 of 48 images that were looked into hold something else"):
        pretrain(config, tmp_path / "run", resume=True)


@pytest.mark.parametrize("loss", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-99])])
def test_a_run_that_lost_its_listing_goes_on_with_what_data_json_has(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str], loss: Callable[[Path], object]
) -> None:
    config, run = small(epochs=2, data__source=str(photos)), tmp_path / "run"
    pretrain(config, run)
    loss(run / "listing.npz")
    pretrain(config, run, resume=True)
    assert "Modification times could not be compared" in capsys.readouterr().out
    (photos / "class0/04.bmp").rename(photos / "class1/04.bmp")
    with pytest.raises(UserError, match="names, sizes or contents differ"):
        pretrain(config, run, resume=True)


def test_verify_data_reads_every_byte_at_the_start_and_on_a_resume(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")
    sizes = ["--epochs", "2", "--batch-size", "16", "--neighbors.window", "1", "--neighbors.k", "2"]
    long = photos / "class0" / "04.bmp"
    long.write_bytes(long.read_bytes() + bytes(1_000_000))
    words = ["pretrain", "desk-resnet", "--data", str(photos), "--out", run, "--verify-data", "--no-curves"]
    main([*words, *sizes])
    main(["pretrain", "--resume", run, "--no-curves"])
    assert "and so does every byte of them" in capsys.readouterr().out
    content, time = bytearray(long.read_bytes()), long.stat().st_mtime_ns
    content[100_000] = 1  # between the sampled pieces
    long.write_bytes(content)
    os.utime(long, ns=(time, time))
    main(["pretrain", "--resume", run, "--no-verify-data", "--no-curves"])
    assert "class0/04.bmp" in refusal(["pretrain", "--resume", run], capsys)  # a run begun so goes on so


def rows(run: Path) -> list[list[str]]:
    with open(run / "unreadable.csv", encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["image", "file", "reason"]
    return lines


def test_unreadable_images_are_listed_in_the_run_also_after_a_resume(
    tmp_path: Path, photos: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = sorted(photos.rglob("*.bmp"))
    for i in (2, 30):
        files[i].write_bytes(bytes(files[i].stat().st_size))
    config = small(epochs=2, data__source=str(photos), data__max_unreadable=0.1, views__in_memory=False)
    pretrain(config, tmp_path / "run")
    assert [row[:2] for row in rows(tmp_path / "run")] == [["2", str(files[2])], ["30", str(files[30])]]
    assert all("no image of a known format" in row[2] for row in rows(tmp_path / "run"))
    assert f"listed in {tmp_path / 'run' / 'unreadable.csv'}" in capsys.readouterr().out.replace("\n", "")
    before = (tmp_path / "run" / "unreadable.csv").read_bytes()
    pretrain(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "unreadable.csv").read_bytes() == before


def test_a_run_that_stops_for_too_many_unreadable_images_lists_them(tmp_path: Path, photos: Path) -> None:
    files = sorted(photos.rglob("*.bmp"))
    for path in files[:12]:
        path.write_bytes(b"?")
    config = small(epochs=2, data__source=str(photos), data__max_unreadable=0.01, views__in_memory=False)
    with pytest.raises(UserError, match="images cannot be read, more than"):
        pretrain(config, tmp_path / "run")
    assert {row[1] for row in rows(tmp_path / "run")} <= {str(path) for path in files[:12]}


def test_the_list_takes_any_file_name(tmp_path: Path) -> None:
    names = [b"caf\xe9.png", b"a\nb.png", b'q"u,o.png', b"\x1b[31m.png"]
    for name in names:
        (tmp_path / os.fsdecode(name)).write_bytes(b"?")
    images = FolderImages(tmp_path)
    found = {i: f"{images.where(i)}: broken" for i in range(len(images))}
    (tmp_path / "run").mkdir()
    list_unreadable(tmp_path / "run", images, {0: found[0], 2: found[2]})
    list_unreadable(tmp_path / "run", images, {i: found[i] for i in (1, 3)})
    lines = rows(tmp_path / "run")
    assert [row[0] for row in lines] == ["0", "1", "2", "3"]
    assert [row[2] for row in lines] == ["broken"] * 4
    text = (tmp_path / "run" / "unreadable.csv").read_text()
    assert "\x1b" not in text
    assert r"caf\xe9.png" in text
    assert r"a\nb.png" in text
