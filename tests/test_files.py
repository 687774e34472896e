"""A file is written whole or not at all, whatever happens in the middle."""

import hashlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from helpers import forked, names

from adasim.util.files import TEMPORARY, atomic_write, remove_leftovers, sha256_file


def test_bytes_and_writers_give_the_same_file_which_replaces_an_earlier_one(tmp_path: Path) -> None:
    for content in (b"a long first version", b"", b"second"):
        atomic_write(tmp_path / "bytes", content)
        atomic_write(tmp_path / "writer", lambda file, content=content: file.write(content))  # type: ignore[misc]
        assert (tmp_path / "bytes").read_bytes() == (tmp_path / "writer").read_bytes() == content
        assert sha256_file(tmp_path / "bytes") == hashlib.sha256(content).hexdigest()
    assert names(tmp_path) == ["bytes", "writer"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise error

    atomic_write(tmp_path / "x", b"old")
    with pytest.raises(type(error)):
        atomic_write(tmp_path / "x", fail)
    assert (tmp_path / "x").read_bytes() == b"old"
    assert names(tmp_path) == ["x"]


@pytest.mark.parametrize(
    ("call", "when", "expected"),
    [("fsync", "before", b"old"), ("replace", "before", b"old"), ("replace", "after", b"new" * 100_000)],
    ids=["before fsync", "before replace", "after replace"],
)
def test_sigkill_leaves_the_old_or_the_new_file_whole(
    tmp_path: Path, call: str, when: str, expected: bytes
) -> None:
    path, real = tmp_path / "x", getattr(os, call)
    path.write_bytes(b"old")

    def killing(*arguments: Any) -> None:
        if when == "after":
            real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        setattr(os, call, killing)
        atomic_write(path, b"new" * 100_000)

    assert forked(work)[0] == -signal.SIGKILL
    assert path.read_bytes() == expected
    assert len(remove_leftovers(tmp_path)) == (expected == b"old")
    assert names(tmp_path) == ["x"]


def test_the_file_reaches_the_disk_before_its_name_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    reals: dict[str, Any] = {"fsync": os.fsync, "replace": os.replace}

    def note(name: str, *given: Any) -> None:
        calls.append(name)
        reals[name](*given)

    for name in reals:
        monkeypatch.setattr(os, name, partial(note, name))
    atomic_write(tmp_path / "x", b"abc")
    assert calls == ["fsync", "replace", "fsync"]


def test_leftovers_are_files_and_folders_with_our_suffix_alone(tmp_path: Path) -> None:
    outside, folder = tmp_path / "outside", tmp_path / "run"
    for place in (outside, folder / f"step{TEMPORARY}", folder / "sub"):
        place.mkdir(parents=True)
    kept = (outside / "precious", folder / "user.tmp", folder / "sub" / f"deep{TEMPORARY}")
    for file in (*kept, folder / f"step{TEMPORARY}" / "half", folder / f"file{TEMPORARY}"):
        file.write_text("")
    (folder / f"link{TEMPORARY}").symlink_to(outside, target_is_directory=True)
    assert len(remove_leftovers(folder)) == 3
    assert names(folder) == ["sub", "user.tmp"]
    assert all(file.exists() for file in kept)
    assert remove_leftovers(tmp_path / "absent") == []
