"""Text that others wrote (names of files, results, messages of libraries) reaches a terminal as text alone."""

import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from rich.table import Table
from rich.text import Text

import adasim
from adasim.cli.main import main
from adasim.util import terminal
from adasim.util.terminal import printable

HOSTILE = "a\x1b]0;owned \u202egpj.exe [/dim] [red] :smile: \x9b31m caf\udce9"
HARMLESS = r"a\x1b]0;owned \u202egpj.exe [/dim] [red] :smile: \u009b31m caf\xe9"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (HOSTILE, HARMLESS),
        ("two\nlines\tand\rmore", r"two\nlines\tand\rmore"),
        ("\ud800", r"\ud800"),
        ("photo 1 (é, 漢字, 👩\u200d💻).jpg", "photo 1 (é, 漢字, 👩\u200d💻).jpg"),
        (printable(HOSTILE), HARMLESS),
    ],
)
def test_what_a_terminal_would_obey_is_escaped_and_everything_else_is_kept(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_a_console_shows_hostile_text_in_every_place_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal.console(width=200)
    console.print(HOSTILE)
    console.print(Text(HOSTILE, "bold"))
    console.out(HOSTILE)
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    console.print(table)
    terminal.complain(HOSTILE)
    captured = capsys.readouterr()
    assert captured.out.count(HARMLESS) == 7
    assert captured.err == f"adasim: {HARMLESS}\n"
    assert not set("\x1b\x9b\u202e") & set(captured.out + captured.err)


def test_an_ascii_terminal_gets_escapes_instead_of_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    terminal.console().print("accuracy ± 0.5")
    assert raw.getvalue() == b"accuracy \\xb1 0.5\n"


def test_no_other_module_makes_a_console() -> None:
    """Nor prints past it; what the command `--version` says is our own."""
    for path in Path(adasim.__file__).parent.rglob("*.py"):
        if path.name not in ("terminal.py", "interrupts.py"):
            assert not re.findall(r"^.*( Console\(|^ *print\().*$", path.read_text(), re.M), path


def test_images_with_hostile_names_are_told_of_and_the_run_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Unreadable, and with names that are not UTF-8, that colour the terminal, or that look like markup."""
    photos, out = tmp_path / "photos [dim]", tmp_path / "run [" / "red]"
    photos.mkdir()
    for i in range(20):
        Image.fromarray(np.full((16, 16, 3), 12 * i, np.uint8)).save(photos / f"{i}.png")
    for name in (b"caf\xe9.png", b"\x1b[31mred.png", b"[dim].png"):
        with open(os.path.join(os.fsencode(photos), name), "wb") as file:
            file.write(b"broken")
    small = "--neighbors.window 1 --neighbors.k 2 --views.size 16 --simsiam.proj-dim 16 --simsiam.pred-dim 8"
    more = "--epochs 2 --batch-size 10 --data.max-unreadable 0.5 --no-curves --no-compare"
    places = ["--data", str(photos), "--out", str(out)]
    main(["pretrain", "desk-resnet", *f"{small} {more}".split(), *places])
    shown = capfd.readouterr().out
    assert "3 of 23 images cannot be read" in shown
    assert str(out / "backbone.safetensors") in shown
    assert "\x1b" not in shown
    with pytest.raises(SystemExit, match="2"):
        main(["pretrain", "--resume", str(out), "--data.max-unreadable", "0"])
    said = capfd.readouterr().err
    assert r"\x1b[31mred.png" in said
    assert "\x1b" not in said


@pytest.mark.slow
@pytest.mark.parametrize("words", [["pretrain"], ["pretrain", "demo", "--help"], ["--version"]])
def test_a_pipe_that_nobody_reads_is_no_traceback(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "adasim", *words]
    try:
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")
