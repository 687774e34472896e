"""Where each command may write, and whether what it takes is installed: asked before any work, and without torch."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY

WEIGHTS_FILE, CONFIG_FILE, ONNX_FILE, PT2_FILE = "model.safetensors", "config.json", "model.onnx", "model.pt2"
TRANSFORM_FILE, TIMM_FILE, HF_FILE = "transform.py", "adasim_model.py", "modeling_adasim.py"
EXPORT_FILES = {
    *(WEIGHTS_FILE, CONFIG_FILE, ONNX_FILE, PT2_FILE, TRANSFORM_FILE, TIMM_FILE, HF_FILE),
    *("preprocessor_config.json", "README.md"),
}
"""All that an export may consist of."""
FIGURE_MARK = "adasim plot"
_PAGE_MARK = '<meta name="generator" content="adasim explore">'
SHEET_NAME = re.compile(r"sheet-[0-9]{5}\.webp")
"""A file of thumbnails beside a page."""


def check_output(out: Path, overwrite: bool, option: str = "--out") -> None:
    """Refuse a file that is there already, or one that cannot be written."""
    if out.is_dir():
        raise UserError(f"{option} {out} is a folder. Name a file.")
    check_folder(out, option)
    if os.path.lexists(out) and not overwrite:
        raise _taken(out, option)


def check_folder(out: Path, option: str = "--out") -> None:
    """Refuse a file whose folder is not there, or may not be written to."""
    if not out.parent.is_dir():
        raise UserError(
            f"There is no folder {out.parent} for {option} {out}. Make it first, or choose another {option}."
        )
    if not os.access(out.parent, os.W_OK):
        raise UserError(
            f"{option} {out} cannot be written: no permission in {out.parent}. Choose another {option}."
        )


def missing(package: str, wanted: str, extra: str, otherwise: str = "") -> UserError:
    """The sentence for an optional package that is not installed."""
    return UserError(
        f"{wanted} needs {package}, which is not installed: pip install 'adasim[{extra}]'.{otherwise}"
    )


def check_features_file(out: Path, overwrite: bool) -> None:
    """For `embed`."""
    if out.suffix not in (".npz", ".parquet", ".npy"):
        raise UserError(f"--out {out} must end in .npz, .parquet or .npy.")
    check_output(out, overwrite)
    if out.suffix == ".npy":
        check_output(out.with_suffix(".csv"), overwrite)
    if out.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            otherwise = " Or choose an --out that ends in .npz."
            raise missing("pyarrow", f"--out {out}", "parquet", otherwise) from None


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
    ours = "README.md" in names and "`adasim export`" in (folder / "README.md").read_text(errors="replace")
    strange = sorted(names - EXPORT_FILES - {"__pycache__"})
    if names and (strange or not ours):
        held = f" (it holds {strange[0]})" if strange else ""
        raise UserError(f"{folder} is there already and is not an export alone{held}. Choose another --out.")
    if names and not overwrite:
        raise _taken(folder)


def check_figure(runs: Sequence[Path], out: Path | None) -> list[Path]:
    """For `plot`: the files to write. An earlier figure is replaced, any other file is not."""
    if out is None:
        out = runs[0] if len(runs) == 1 else Path()
    if not out.is_dir() and out.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"--out {out} must end in .png, .svg or .pdf, or be a folder that is there.")
    files = [out / "curves.png", out / "curves.svg"] if out.is_dir() else [out]
    for file in files:
        check_folder(file)
        if os.path.lexists(file) and not _holds(file, FIGURE_MARK):
            raise UserError(f"{file} is no figure of adasim plot, and is not replaced. Choose another --out.")
    return files


def sheets_folder(page: Path) -> Path:
    """Where thumbnails go that a page has no room for."""
    return page.with_name(f"{page.stem}-sheets")


def check_page(page: Path, overwrite: bool) -> None:
    """For `explore`: a page, and thumbnails beside it, that replace an earlier page at most."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {page} is no name for a page: let it end in .html.")
    check_folder(page)
    folder = sheets_folder(page)
    for path in (page, folder):
        if path.exists() and not overwrite:
            raise _taken(path)
    if page.exists() and not _holds(page, _PAGE_MARK):
        raise UserError(f"{page} is no page of adasim explore, and is not replaced. Choose another --out.")
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder} is a file, and pictures of the page may belong there. Choose another --out."
        )
    for name in sorted(path.name for path in folder.iterdir()) if folder.exists() else ():
        if not SHEET_NAME.fullmatch(name) and not name.endswith(TEMPORARY):
            raise UserError(f"{folder} also holds {name}, and is not replaced. Choose another --out.")


def check_lists(folder: Path, names: Sequence[str], overwrite: bool) -> None:
    """For `explore --csv`: a folder that holds no such lists."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--csv {folder} is a file. Name a folder.")
    there = [folder / f"{name}.csv" for name in names if (folder / f"{name}.csv").exists()]
    if there and not overwrite:
        raise _taken(there[0], "--csv")


def _taken(path: Path, option: str = "--out") -> UserError:
    return UserError(f"{path} is there already. Replace it with --overwrite, or choose another {option}.")


def _holds(file: Path, mark: str) -> bool:
    """Whether this is a file of ours."""
    return file.is_file() and os.access(file, os.R_OK) and mark.encode() in file.read_bytes()
