import os
import pickle
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageOps, features

import adasim.util.rgb
from adasim.data import Unreadable, open_images
from adasim.util.rgb import MAX_PIXELS, decode, decode_reduced, to_tensor

from .pictures import picture, save_image, smooth


def bomb() -> bytes:
    """A PNG of a few bytes that claims 60000 x 60000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("fault", ["truncated", "empty", "html", "bomb", "gone", "folder", "pipe"])
def test_a_file_that_is_no_image_is_unreadable_and_says_where(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "x.jpg"
    save_image(smooth(1, 64, 64)[0], path)
    half = path.read_bytes()[: path.stat().st_size // 2]
    path.unlink()
    contents = {"truncated": half, "empty": b"", "html": b"<html>404</html>", "bomb": bomb()}
    if fault == "folder":
        path.mkdir()
    elif fault == "pipe":
        os.mkfifo(path)  # reading it would wait for ever
    elif fault != "gone":
        path.write_bytes(contents[fault])
    with pytest.raises(Unreadable) as caught:
        decode(str(path))
    assert caught.value.where == str(path)
    again = pickle.loads(pickle.dumps(caught.value))  # loader processes send it home
    assert str(again) == str(caught.value)


def test_what_is_see_through_is_white(tmp_path: Path) -> None:
    pixels = torch.zeros(4, 6, 4, dtype=torch.uint8)
    pixels[..., 0] = 200
    pixels[:, :3, 3] = 255  # the left half is opaque red, the right half is see-through
    Image.fromarray(pixels.numpy()).save(tmp_path / "alpha.png")
    decoded = decode(str(tmp_path / "alpha.png"))
    assert decoded[:, 0, 0].tolist() == [200, 0, 0]
    assert decoded[:, 0, 5].tolist() == [255, 255, 255]


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_greys_are_scaled_by_the_depth_that_they_use(tmp_path: Path, bits: int, suffix: str) -> None:
    ramp = np.linspace(0, 2**bits - 1, 256).round().astype(np.uint16)[None].repeat(4, 0)
    Image.fromarray(ramp).save(tmp_path / f"x.{suffix}")
    assert torch.equal(
        decode(str(tmp_path / f"x.{suffix}")), torch.arange(256, dtype=torch.uint8).expand(3, 4, 256)
    )


def test_black_and_signed_deep_greys_are_black_at_zero_and_below(tmp_path: Path) -> None:
    Image.fromarray(np.zeros((4, 5), np.uint16)).save(tmp_path / "black.png")
    assert torch.equal(decode(str(tmp_path / "black.png")), torch.zeros(3, 4, 5, dtype=torch.uint8))
    Image.fromarray(np.array([[-7, 0, 2**20 - 1]], np.int32)).save(tmp_path / "x.tif")
    assert decode(str(tmp_path / "x.tif"))[0, 0].tolist() == [0, 0, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_undone_as_pillow_does(tmp_path: Path, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = picture(smooth(1, 20, 30)[0])
    image.save(tmp_path / "x.png", exif=exif)
    with Image.open(tmp_path / "x.png") as saved:
        expected = np.array(ImageOps.exif_transpose(saved))
    assert torch.equal(decode(str(tmp_path / "x.png")), torch.from_numpy(expected).permute(2, 0, 1))


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize(
    "exif", [b"garbage!!!!", b"\0" * 32, b"", b"II*\0", b"II*\0\x08\0\0\0\x05\0\x12\x01"]
)
def test_a_photo_with_damaged_exif_is_shown_as_it_lies(tmp_path: Path, exif: bytes) -> None:
    image = picture(smooth(1, 64, 48)[0])
    image.save(tmp_path / "plain.jpg", dpi=(72, 72))
    image.save(tmp_path / "x.jpg", dpi=(72, 72), exif=b"Exif\0\0" + exif)
    assert torch.equal(decode(str(tmp_path / "x.jpg")), decode(str(tmp_path / "plain.jpg")))
    reduced, scale = decode_reduced(str(tmp_path / "x.jpg"), lambda height, width: 4)
    assert (reduced.shape, scale) == ((3, 16, 12), 4)


def test_a_heic_photo_is_read_the_right_way_up_where_pillow_heif_is_installed(tmp_path: Path) -> None:
    pytest.importorskip("pillow_heif")
    pixels = smooth(1, 96, 64)[0]
    photo = picture(pixels)
    photo.getexif()[0x0112] = 6  # show it turned a quarter to the right
    photo.save(tmp_path / "IMG_0001.HEIC", quality=95)
    images = open_images(str(tmp_path))
    assert len(images) == 1
    decoded = images.load(0)
    assert decoded.shape == (3, 64, 96)
    assert (decoded.int() - torch.rot90(pixels, -1, (1, 2))).abs().float().mean() < 4
    (tmp_path / "IMG_0001.HEIC").rename(tmp_path / "misnamed.jpg")
    assert torch.equal(decode(str(tmp_path / "misnamed.jpg")), decoded)


def test_a_heic_photo_in_a_jpgs_clothes_names_what_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adasim.util.rgb, "HAS_HEIF", False)
    (tmp_path / "x.jpg").write_bytes(b"\0\0\0\x18ftypheic" + b"\0" * 64)
    with pytest.raises(Unreadable, match="it holds a HEIC photo; pip install pillow-heif reads it"):
        decode(str(tmp_path / "x.jpg"))


def test_an_avif_photo_is_found_and_read_where_pillow_has_it(tmp_path: Path) -> None:
    if "avif" not in features.get_supported_modules():
        pytest.skip("this Pillow has no AVIF")
    pixels = smooth(1, 32, 48)[0]
    picture(pixels).save(tmp_path / "x.avif", quality=95)
    assert (open_images(str(tmp_path)).load(0).int() - pixels).abs().float().mean() < 4


def test_postscript_in_a_jpgs_clothes_starts_no_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program `gs` first on the path would tell if it were started."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None, raising=False)  # newer ones remember where one is
    (tmp_path / "x.jpg").write_bytes(
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
    )
    with pytest.raises(Unreadable, match="no image of a known format"):
        decode(str(tmp_path / "x.jpg"))
    assert not (tmp_path / "started").exists()


@pytest.mark.slow
def test_the_largest_images_stay_under_two_gigabytes(tmp_path: Path) -> None:
    """The kernel's figure for a process of its own: what decoding adds, with 22 of the 179 megapixels allowed."""
    side = 4700
    deep = np.zeros((side, side), np.uint16)
    deep[-1, -1] = 65535
    Image.fromarray(deep).save(tmp_path / "deep.png", compress_level=1)
    Image.new("LA", (side, side)).save(tmp_path / "alpha.png", compress_level=1)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (side, side)).save(tmp_path / "sideways.png", compress_level=1, exif=exif)
    save_image(smooth(1, 8, 8)[0], tmp_path / "small.png")
    code = (
        "import resource, sys\n"
        "from adasim.util.rgb import decode\n"
        "for path in sys.argv[1:]:\n"
        "    decode(path)\n"
        "    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)\n"
    )
    paths = [str(tmp_path / f"{name}.png") for name in ("small", "deep", "alpha", "sideways")]
    done = subprocess.run([sys.executable, "-c", code, *paths], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, *after = (1024 * int(line) for line in done.stdout.split())
    assert (max(after) - before) * MAX_PIXELS / side**2 < 2.2e9, (before, after)


@pytest.mark.parametrize("mode", ["L", "P", "RGB", "RGBA", "CMYK", "YCbCr", "I;16"])
def test_an_image_of_several_strips_has_the_pixels_that_pillow_gives(mode: str) -> None:
    image = picture(smooth(1, 1100, 1000)[0])
    image = image.convert("L").convert(mode) if mode == "I;16" else image.convert(mode)
    plain = image.convert("L") if mode == "I;16" else image
    assert torch.equal(to_tensor(image), torch.from_numpy(np.array(plain.convert("RGB"))).permute(2, 0, 1))
