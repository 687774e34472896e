import pickle
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from adasim.data import Unreadable
from adasim.data.folder import decode

from .pictures import save_image, smooth


def bomb() -> bytes:
    """A PNG of a few bytes that claims 60000 x 60000 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 60000, 60000, 8, 0, 0, 0, 0)
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + pixels + chunk(b"IEND", b"")


@pytest.mark.parametrize("fault", ["truncated", "empty", "html", "bomb", "gone", "folder"])
def test_a_file_that_is_no_image_is_unreadable_and_says_where(tmp_path: Path, fault: str) -> None:
    path = tmp_path / "x.jpg"
    Image.fromarray(smooth(1, 64, 64)[0].permute(1, 2, 0).numpy()).save(path)
    whole = path.read_bytes()
    if fault == "gone":
        path.unlink()
    elif fault == "folder":
        path.unlink()
        path.mkdir()
    else:
        contents = {
            "truncated": whole[: len(whole) // 2],
            "empty": b"",
            "html": b"<html>404</html>",
            "bomb": bomb(),
        }
        path.write_bytes(contents[fault])
    with pytest.raises(Unreadable) as caught:
        decode(str(path))
    assert caught.value.where == str(path)
    again = pickle.loads(pickle.dumps(caught.value))  # loader processes send it home
    assert str(again) == str(caught.value)


def test_cmyk_comes_out_as_the_rgb_it_was_made_from(tmp_path: Path) -> None:
    pixels = smooth(1, 32, 32)[0]
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).convert("CMYK").save(tmp_path / "x.jpg", quality=100)
    assert (decode(str(tmp_path / "x.jpg")).int() - pixels).abs().float().mean() < 3


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).round().astype(np.uint16)[None].repeat(4, 0)
    for suffix in ("png", "tif"):
        Image.fromarray(ramp).save(tmp_path / f"x.{suffix}")
        decoded = decode(str(tmp_path / f"x.{suffix}"))
        assert torch.equal(decoded, torch.arange(256, dtype=torch.uint8).expand(3, 4, 256))


def test_palette_and_alpha_look_as_a_viewer_shows_them(tmp_path: Path) -> None:
    pixels = torch.zeros(4, 6, 4, dtype=torch.uint8)
    pixels[..., 0] = 200
    pixels[:, :3, 3] = 255  # the left half is opaque red, the right half is see-through
    Image.fromarray(pixels.numpy()).save(tmp_path / "alpha.png")
    decoded = decode(str(tmp_path / "alpha.png"))
    assert decoded[:, 0, 0].tolist() == [200, 0, 0]
    assert decoded[:, 0, 5].tolist() == [255, 255, 255]

    palette = Image.fromarray(np.array([[0, 1], [2, 0]], np.uint8), mode=None).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    palette.save(tmp_path / "palette.png")
    assert decode(str(tmp_path / "palette.png"))[:, 1, 0].tolist() == [70, 80, 90]


def test_the_camera_held_sideways_is_turned_upright(tmp_path: Path) -> None:
    pixels = smooth(1, 20, 30)[0]
    exif = Image.Exif()
    exif[0x0112] = 6  # show it turned a quarter to the right
    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(tmp_path / "x.png", exif=exif)
    assert torch.equal(decode(str(tmp_path / "x.png")), torch.rot90(pixels, -1, (1, 2)))


def test_a_plain_file_keeps_its_pixels(tmp_path: Path) -> None:
    pixels = smooth(1, 20, 30)[0]
    save_image(pixels, tmp_path / "x.png")
    assert torch.equal(decode(str(tmp_path / "x.png")), pixels)
