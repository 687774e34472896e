"""Data of your own in one file: the images of a .tar archive, read where they lie.

    adasim pretrain dino-vit-s16 --plugin examples/own_data.py --data tar:photos.tar --out runs/photos

The first-level folder of an image is its class.
"""

import hashlib
import io
import tarfile
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from adasim.data import ImageSet, Unreadable
from adasim.registry import SOURCES
from adasim.util.errors import UserError
from adasim.util.rgb import to_tensor


class TarImages(ImageSet):
    def __init__(self, path: str) -> None:
        with tarfile.open(path, "r:") as archive:
            files = sorted(
                (member.name, member.offset_data, member.size) for member in archive if member.isfile()
            )
        self.name = Path(path).stem
        self._path, self._files = path, files
        folders = [name.partition("/")[0] for name, _, _ in files]
        self.classes = sorted(set(folders))
        self.labels = torch.tensor([self.classes.index(folder) for folder in folders])

    def __len__(self) -> int:
        return len(self._files)

    def load(self, i: int) -> Tensor:
        try:
            return to_tensor(Image.open(io.BytesIO(self._bytes(i))))
        except Exception as error:
            raise Unreadable(self.where(i), str(error)) from None  # counted, and replaced by another image

    def where(self, i: int) -> str:
        return f"{self._path}:{self._files[i][0]}"

    def listing(self) -> list[str]:
        return [f"{name} {size}" for name, _, size in self._files]

    def content(self, i: int, whole: bool = False) -> str:
        return hashlib.sha256(self._bytes(i)).hexdigest()

    def _bytes(self, i: int) -> bytes:
        _, start, size = self._files[i]
        # Opened anew: a handle is not shared by threads and loader processes.
        with open(self._path, "rb") as file:
            file.seek(start)
            return file.read(size)


@SOURCES.register("tar")
def open_tar(path: str, *, size: int, split: str, seed: int) -> TarImages:
    if split == "test":
        raise UserError(f"tar:{path} has no test images. Name a second archive with --test.")
    try:
        return TarImages(path)
    except (OSError, tarfile.TarError) as error:
        raise UserError(f"tar:{path} cannot be read: {error}.") from None
