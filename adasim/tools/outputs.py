"""What every command that writes something asks: is there room for it, and is what it takes installed?"""

from __future__ import annotations

import os
from pathlib import Path

from adasim.util.errors import UserError

ENDINGS = (".npz", ".parquet", ".npy")
"""Of files of features."""
WEIGHTS_FILE, CONFIG_FILE, ONNX_FILE, PT2_FILE = "model.safetensors", "config.json", "model.onnx", "model.pt2"
TRANSFORM_FILE, TIMM_FILE, HF_FILE = "transform.py", "adasim_model.py", "modeling_adasim.py"
EXPORT_FILES = {
    *(WEIGHTS_FILE, CONFIG_FILE, ONNX_FILE, PT2_FILE, TRANSFORM_FILE, TIMM_FILE, HF_FILE),
    *("preprocessor_config.json", "README.md"),
}
"""All that an export may consist of."""


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse, before any work, a file that is there already, or one that cannot be written."""
    if out.is_dir():
        raise UserError(f"--out {out} is a folder. Name a file.")
    check_folder(out)
    if os.path.lexists(out) and not overwrite:
        raise UserError(f"{out} is there already. Replace it with --overwrite, or choose another --out.")


def check_folder(out: Path) -> None:
    """Refuse a file whose folder is not there, or may not be written to."""
    if not out.parent.is_dir():
        raise UserError(
            f"There is no folder {out.parent} for --out {out}. Make it first, or choose another --out."
        )
    if not os.access(out.parent, os.W_OK):
        raise UserError(
            f"--out {out} cannot be written: no permission in {out.parent}. Choose another --out."
        )


def missing(package: str, wanted: str, extra: str, otherwise: str = "") -> UserError:
    """The sentence for an optional package that is not installed."""
    way_out = f" {otherwise}" if otherwise else ""
    return UserError(
        f"{wanted} needs {package}, which is not installed: pip install 'adasim[{extra}]'.{way_out}"
    )


def check_features_file(out: Path, overwrite: bool) -> Path:
    """Refuse at once a file of features that could not be written after hours."""
    if out.suffix not in ENDINGS:
        raise UserError(f"--out {out} must end in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}.")
    check_output(out, overwrite)
    if out.suffix == ".npy":
        check_output(listing_beside(out), overwrite)
    if out.suffix == ".parquet":
        try:
            import pyarrow.parquet  # noqa: F401
        except ImportError:
            raise missing(
                "pyarrow", f"--out {out}", "parquet", "Or choose an --out that ends in .npz."
            ) from None
    return out


def listing_beside(out: Path) -> Path:
    """The file beside a .npy that says which row is which image."""
    return out.with_suffix(".csv")


def check_export_folder(folder: Path, overwrite: bool) -> None:
    """Only an absent or empty folder, or with `overwrite` an earlier export and nothing else, may be taken."""
    if not os.path.lexists(folder):
        return
    if not folder.is_dir() or folder.is_symlink():
        raise UserError(f"--out {folder} is not a folder. Choose one that does not exist yet.")
    names = {path.name for path in folder.iterdir()}
    if not names:
        return
    ours = "README.md" in names and "`adasim export`" in (folder / "README.md").read_text(errors="replace")
    strange = sorted(names - EXPORT_FILES - {"__pycache__"})
    if not ours or strange:
        held = f" (it holds {strange[0]})" if strange else ""
        raise UserError(f"{folder} is there already and is not an export alone{held}. Choose another --out.")
    if not overwrite:
        raise UserError(f"{folder} is there already. Replace it with --overwrite, or choose another --out.")
