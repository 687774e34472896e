"""Where each command may write: asked before any work, and without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path

from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY

FIGURE_MARK = "adasim plot"
SHEET_NAME = re.compile(r"sheet-[0-9]{5}\.webp")
"""A file of thumbnails beside a page."""
_PAGE_MARK = '<meta name="generator" content="adasim explore">'
_EXPORT_FILES = {
    *("README.md", "transform.py", "model.safetensors", "config.json", "model.onnx", "model.pt2"),
    *("adasim_model.py", "modeling_adasim.py", "preprocessor_config.json", "__pycache__"),
}


def check_output(out: Path, overwrite: bool, option: str = "--out") -> None:
    """Refuse a file that is there already, or one that cannot be written."""
    if out.is_dir():
        raise UserError(f"{option} {out} is a folder. Name a file.")
    check_folder(out, option)
    _check_free(out, overwrite, option)


def first_free(path: Path) -> Path:
    """This name, or where it is taken the first that is free of NAME-2, NAME-3, ..."""
    names = (path.with_stem(f"{path.stem}-{number}") for number in count(2))
    return next(name for name in chain([path], names) if not os.path.lexists(name))


def check_folder(out: Path, option: str = "--out") -> None:
    if not out.parent.is_dir():
        raise UserError(f"There is no folder {out.parent} for {option} {out}. Make it, or choose another.")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"{option} {out} cannot be written: no permission in {out.parent}. Choose another.")


def _check_free(path: Path, overwrite: bool, option: str = "--out") -> None:
    if os.path.lexists(path) and not overwrite:
        raise UserError(f"{path} is there already. Replace it with --overwrite, or choose another {option}.")


def _check_ours(file: Path, mark: str, what: str) -> None:
    """Refuse to replace a file that is none of ours."""
    if os.path.lexists(file) and not (file.is_file() and mark.encode() in file.read_bytes()):
        raise UserError(f"{file} is no {what}, and is not replaced. Choose another --out.")


def missing(package: str, wanted: str, extra: str) -> UserError:
    """The sentence for an optional package that is not installed."""
    return UserError(f"{wanted} needs {package}, which is not installed: pip install 'adasim[{extra}]'.")


def check_features_file(out: Path, overwrite: bool) -> None:
    """For `embed`."""
    if out.suffix not in (".npz", ".parquet", ".npy"):
        raise UserError(f"--out {out} must end in .npz, .parquet or .npy.")
    check_output(out, overwrite)
    if out.suffix == ".npy":
        check_output(out.with_suffix(".csv"), overwrite)
    if out.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise missing("pyarrow", f"--out {out}", "parquet")


def export_folder(run: Path, to: str) -> Path:
    """Where a run is exported to where nobody says: beside it, as in runs/photos-onnx."""
    run = run if run.name not in ("", "..") else run.resolve()
    return run.with_name(f"{run.name}-{to}")


def check_export_folder(folder: Path, overwrite: bool) -> None:
    """For `export`: an absent or empty folder, or with `overwrite` an earlier export and nothing else."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"--out {folder} is not a folder. Choose one that does not exist yet.")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    ours = "README.md" in names and "`adasim export`" in (folder / "README.md").read_text(errors="replace")
    if not ours or names - _EXPORT_FILES:
        strange = min(names - _EXPORT_FILES or names)
        raise UserError(
            f"{folder} is not an export alone (it holds {strange}), and is not replaced. Choose another --out."
        )
    _check_free(folder, overwrite)


def check_figure(runs: Sequence[Path], out: Path | None) -> list[Path]:
    """For `plot`: the files to write. An earlier figure is replaced, any other file is not."""
    if out is None:
        out = runs[0] if len(runs) == 1 else Path()
    if not out.is_dir() and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {out} must end in .png, .svg or .pdf, or be a folder that is there.")
    files = [out / "curves.png", out / "curves.svg"] if out.is_dir() else [out]
    for file in files:
        check_folder(file)
        _check_ours(file, FIGURE_MARK, "figure of adasim plot")
    return files


def sheets_folder(page: Path) -> Path:
    """Where thumbnails go that a page has no room for."""
    return page.with_name(f"{page.stem}-sheets")


def check_page(page: Path, overwrite: bool) -> None:
    """For `explore`: a page, and thumbnails beside it, that replace an earlier page at most."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {page} is no name for a page: let it end in .html.")
    folder = sheets_folder(page)
    check_folder(page)
    _check_free(page, overwrite)
    _check_free(folder, overwrite)
    _check_ours(page, _PAGE_MARK, "page of adasim explore")
    held = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    strange = [name for name in held if not SHEET_NAME.fullmatch(name) and not name.endswith(TEMPORARY)]
    if strange or folder.is_file():
        what = f"also holds {min(strange)}" if strange else "is a file"
        raise UserError(f"{folder} {what}, and is not replaced. Choose another --out.")


def check_lists(folder: Path, names: Sequence[str], overwrite: bool) -> None:
    """For `explore --csv`: a folder that holds no such lists."""
    if folder.is_file():
        raise UserError(f"--csv {folder} is a file. Name a folder.")
    for name in names:
        _check_free(folder / f"{name}.csv", overwrite, "--csv")
