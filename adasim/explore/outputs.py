"""Where an exploration may be written: asked before any work, and without torch."""

from __future__ import annotations

import re
from pathlib import Path

from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY

_MARK = b'<meta name="generator" content="adasim explore">'
SHEET = re.compile(r"sheet-[0-9]{5}\.webp")


def sheets_folder(page: Path) -> Path:
    """Where thumbnails go that the page has no room for."""
    return page.with_name(f"{page.stem}-sheets")


def check_page(page: Path, overwrite: bool) -> None:
    """Refuse a page that cannot be written, or that would replace something else."""
    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {page} is no name for a page: let it end in .html.")
    if not page.parent.is_dir():
        raise UserError(f"There is no folder {page.parent} for the page. Make it, or choose another --out.")
    folder = sheets_folder(page)
    for path in (page, folder):
        if path.exists() and not overwrite:
            raise UserError(f"{path} is there already. Replace it with --overwrite, or choose another --out.")
    if page.exists() and not (page.is_file() and _MARK in _beginning(page)):
        raise UserError(f"{page} is no page of adasim explore, and is not replaced. Choose another --out.")
    if folder.exists() and not folder.is_dir():
        raise UserError(
            f"{folder} is a file, and pictures of the page may belong there. Choose another --out."
        )
    if folder.exists():
        strange = [
            path.name
            for path in folder.iterdir()
            if not SHEET.fullmatch(path.name) and not path.name.endswith(TEMPORARY)
        ]
        if strange:
            raise UserError(f"{folder} also holds {strange[0]}, and is not replaced. Choose another --out.")


def check_csv(folder: Path, tables: tuple[str, ...], overwrite: bool) -> None:
    """Refuse a folder that holds such lists already."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"--csv {folder} is a file. Name a folder.")
    there = [name for name in tables if (folder / f"{name}.csv").exists()]
    if there and not overwrite:
        raise UserError(
            f"{folder / there[0]}.csv is there already. Replace it with --overwrite, or choose another folder."
        )


def check_atlas(path: Path, overwrite: bool) -> None:
    """Refuse a file that is there, or whose name Embedding Atlas would not understand."""
    if path.suffix != ".jsonl":
        raise UserError(f"--export-atlas {path} must end in .jsonl.")
    if not path.parent.is_dir():
        raise UserError(f"There is no folder {path.parent}. Make it, or choose another --export-atlas.")
    if path.exists() and not overwrite:
        raise UserError(f"{path} is there already. Replace it with --overwrite, or choose another name.")


def _beginning(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(512)
