"""Letters in many fonts, as images: a data set whose classes are right by construction and whose instances differ.

    python -m benchmarks.paper.glyphs --fonts /usr/share/fonts --draw 0 glyphs-0

Writes glyphs-0/{train,test}/{A..Z}/*.png: the capital letters of the fonts that it finds, 32 pixels, grey, black on
white. It installs none: docs/benchmarks.md names Debian's packages. Fonts without the letters, and fonts that look
like another, are left out. `--draw` chooses which fonts are for training and which for testing; a font more or less
on the machine changes little of it.
"""

from __future__ import annotations

import argparse
import hashlib
import string
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIZE, MARGIN, LARGE = 32, 3, 96
ENDINGS = (".ttf", ".otf", ".pfb")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("--fonts", type=Path, default=Path("/usr/share/fonts"), help="where fonts lie")
    parser.add_argument("--train", type=int, default=300, help="fonts for training")
    parser.add_argument("--test", type=int, default=100, help="other fonts for testing")
    parser.add_argument("--draw", type=int, default=0, help="which fonts: a random seed")
    args = parser.parse_args()
    if args.out.exists():
        sys.exit(f"{args.out} exists already. Name another folder.")
    alphabets = distinct_alphabets(args.fonts)
    needed = args.train + args.test
    if len(alphabets) < needed:
        sys.exit(f"{args.fonts} has {len(alphabets)} fonts with distinct letters; {needed} are needed.")
    alphabets.sort(key=lambda of: hashlib.sha256(f"{args.draw} {of[0]}".encode()).digest())
    for number, (name, letters) in enumerate(alphabets[:needed]):
        split = "train" if number < args.train else "test"
        for letter, pixels in zip(string.ascii_uppercase, letters, strict=True):
            folder = args.out / split / letter
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(folder / f"{number:04}-{name}.png")
    print(f"{args.train} fonts for training and {args.test} for testing, of {len(alphabets)}: {args.out}")


def distinct_alphabets(fonts: Path) -> list[tuple[str, list[np.ndarray]]]:
    """(name, 26 letters) of each font that has them and looks like no font before it, by name."""
    known: dict[str, tuple[str, list[np.ndarray]]] = {}
    for file in sorted(path for path in fonts.rglob("*") if path.suffix.lower() in ENDINGS):
        letters = alphabet(file)
        if letters is not None:
            coarse = b"".join((letter // 128).tobytes() for letter in letters)
            known.setdefault(hashlib.sha256(coarse).hexdigest(), (file.stem, letters))
    return [*known.values()]


def alphabet(file: Path) -> list[np.ndarray] | None:
    """A to Z, each (32, 32) and uint8; None where the font lacks letters or draws two of them alike."""
    try:
        font = ImageFont.truetype(file, LARGE)
        masks = [font.getmask(letter).getbbox() for letter in string.ascii_uppercase]
    except (OSError, ValueError):
        return None
    if any(box is None for box in masks):
        return None
    letters = [drawn(font, letter) for letter in string.ascii_uppercase]
    different = len({letter.tobytes() for letter in letters}) == len(letters)
    return letters if different else None


def drawn(font: ImageFont.FreeTypeFont, letter: str) -> np.ndarray:
    """One letter in the middle of its square, as large as fits."""
    left, top, right, bottom = font.getbbox(letter)
    width, height = int(right - left) + 1, int(bottom - top) + 1
    sheet = Image.new("L", (width, height), 255)
    ImageDraw.Draw(sheet).text((-left, -top), letter, fill=0, font=font)
    room = SIZE - 2 * MARGIN
    scale = room / max(width, height)
    small = sheet.resize(
        (max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.LANCZOS
    )
    square = Image.new("L", (SIZE, SIZE), 255)
    square.paste(small, ((SIZE - small.width) // 2, (SIZE - small.height) // 2))
    return np.asarray(square)


if __name__ == "__main__":
    main()
