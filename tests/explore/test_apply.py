"""`adasim apply`: a cleaned copy of a folder; the folder itself stays as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import command, photos_of_patterns, refusal

from adasim.data import open_images
from adasim.util.csv import to_csv

COLUMNS = ["id", "split", "file", "label", "verdict", "new_label", "view"]


def verdicts(path: Path, *given: tuple[str, str, str]) -> Path:
    """A file as the page exports it, of (file, verdict, new label)."""
    rows = [("0", "train", file, "", verdict, label, "lonely") for file, verdict, label in given]
    path.write_text(to_csv(COLUMNS, rows), newline="")
    return path


def state(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """train/ and test/ with two classes each, of which one file has an odd name."""
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        photos_of_patterns(tmp_path / "data" / split, "class{c}/{i:02d}.png")
    (tmp_path / "data/train/class0/00.png").rename(tmp_path / "data/train/class0/=odd\n.png")
    return tmp_path / "data"


@pytest.mark.parametrize("how", ["", " --copy"])
def test_left_out_images_are_gone_new_labels_are_applied_and_the_original_is_untouched(
    how: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state(data)
    (data / "train/class1/02.png").write_bytes(before["train/class0/02.png"])  # a name that is taken
    for other in ("notes.txt", "train/class0/clip.mp4", "train/.hidden"):
        (data / other).touch()
    before = state(data)
    verdicts(
        Path("v.csv"),
        ("train/class0/=odd\\n.png", "reject", ""),
        ("test/class1/03.png", "keep", ""),
        ("test/class1/03.png", "reject", ""),  # of several verdicts the weightiest counts
        ("train/class0/02.png", "relabel", ""),
        ("train/class0/02.png", "relabel", "class1"),
        ("train/class0/04.png", "relabel", "new/one"),
        ("train/class0/06.png", "relabel", ""),
        ("train/class0/08.png", "unsure", ""),
        ("train/class7/99.png", "reject", ""),
    )
    command(f"apply v.csv --data data --out clean{how}")
    expected = {name: content for name, content in before.items() if name.endswith(".png")}
    del expected["train/class0/=odd\n.png"], expected["test/class1/03.png"]
    expected["train/class1/02-2.png"] = expected["train/class1/02.png"]  # one of the two has got a number
    expected["train/new/one/04.png"] = expected.pop("train/class0/04.png")
    del expected["train/class0/02.png"]
    assert state(Path("clean")) == expected
    assert state(data) == before
    assert Path("clean/train/class0/08.png").is_symlink() == (not how)
    said = " ".join(capsys.readouterr().out.split())
    for words in (
        "95 images written, 2 left out, 2 moved",
        "1 with a wrong label and no new",
        "fit no image here: 1",
        "other files, not written: 2",
    ):
        assert words in said
    assert [len(open_images("clean", split=split)) for split in ("train", "test")] == [48, 47]
    assert [path.name for path in Path().iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("v.csv --data data --out data/clean", "lies within"),
        ("v.csv --data data --out full", "is there already"),
        ("v.csv --data v.csv --out clean", "no folder"),
        ("none.csv --data data --out clean", "No such file"),
        ("other.csv --data data --out clean", "called like"),
        ("up.csv --data data --out clean", "no name for a class"),
        ("bad.csv --data data --out clean", "no list of verdicts"),
        ("words.csv --data data --out clean", "Verdicts are reject"),
    ],
)
@pytest.mark.usefixtures("data")
def test_bad_input_gets_one_sentence_and_leaves_nothing(
    arguments: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts(Path("v.csv"), ("train/class0/02.png", "reject", ""))
    verdicts(Path("other.csv"), ("elsewhere/02.png", "reject", ""))
    verdicts(Path("up.csv"), ("train/class0/02.png", "relabel", "../../up"))
    verdicts(Path("words.csv"), ("train/class0/02.png", "leave out", ""))
    Path("bad.csv").write_text("a,b\r\n")
    Path("full").mkdir()
    Path("full/mine.txt").touch()
    before = sorted(Path().iterdir())
    assert words in refusal(f"apply {arguments}", capsys)
    assert sorted(Path().iterdir()) == before
