"""Images with a segmentation mask each: two folders, PASCAL VOC's layout or CamVid's, an .npz file, or generated."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from adasim.data.image_folder import SPLIT_FOLDERS
from adasim.data.images import ArrayImages, ImageSet
from adasim.data.sources import open_images
from adasim.util.errors import MissingSplitError, UserError
from adasim.util.rgb import EXTENSIONS, Unreadable, decode, hash_file, open_image, open_regular, reading
from adasim.util.terminal import few

IGNORE = 255
VOC_CLASSES = [
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train"),
    "tvmonitor",
]
_VOC_LISTS = {"train": ("trainaug", "train"), "test": ("val",)}


class MaskedFiles(ImageSet):
    """Pairs of files: a picture and its mask, whose pixel values (or palette places) are class ids."""

    def __init__(self, name: str, pairs: list[tuple[Path, Path]], classes: list[str]) -> None:
        self.name, self.classes, self._pairs = name, classes, pairs
        self.place = str(pairs[0][0].parent)

    def __len__(self) -> int:
        return len(self._pairs)

    def load(self, i: int) -> Tensor:
        return decode(self.where(i))

    def mask(self, i: int) -> Tensor:
        path = self._pairs[i][1]
        with reading(str(path)), open_regular(path) as file, open_image(file) as image:
            if image.mode not in ("L", "P", "1"):
                raise UserError(
                    f"The mask {path} has {image.mode} pixels; masks need one 8-bit class id per pixel "
                    f"(greyscale or palette PNG)."
                )
            return torch.from_numpy(np.array(image, dtype=np.uint8))

    def where(self, i: int) -> str:
        return str(self._pairs[i][0])

    def content(self, i: int, whole: bool = False) -> str:
        return "".join(hash_file(path, whole) for path in self._pairs[i])

    def listing(self) -> list[str]:
        return [f"{picture.name} {mask.name} {_size(picture)} {_size(mask)}" for picture, mask in self._pairs]


def open_masked(source: str, *, size: int, split: str) -> ImageSet:
    """Images with masks. Raises a UserError if the source has no such split, or no masks.

    Args:
        source: a folder with images/ and masks/ (also inside train/ and test/ or val/), CamVid's with train/ and
            trainannot/, test/ and testannot/, PASCAL VOC's with JPEGImages, SegmentationClass and ImageSets, an
            .npz file with masks, or `synthetic[:COUNT]`.
        size: side of the images that `synthetic` draws.
    """
    root = Path(source)
    if not os.path.isdir(source):
        images = open_images(source, size=size, split=split)
        if (mask := images.mask(0)) is None:
            raise UserError(f"{source} has no masks. Give an .npz file with the arrays images and masks.")
        if isinstance(images, ArrayImages):
            require_same_size(images.images, mask, f"every image of {images.name}")
        return images
    if (root / "SegmentationClass").is_dir() and (root / "JPEGImages").is_dir():
        return _voc(root, split)
    for name in SPLIT_FOLDERS[split]:
        if (root / f"{name}annot").is_dir():
            return _pairs(f"{root.name}-{name}", root / name, root / f"{name}annot")
    divided = next((root / name for name in SPLIT_FOLDERS[split] if (root / name / "masks").is_dir()), None)
    if divided is None and split == "test":
        raise MissingSplitError(
            f"{source} has no test images with masks: no test/ or val/ with images/ and masks/ in it, "
            f"and no testannot/ or valannot/."
        )
    root = divided or root
    if not ((root / "images").is_dir() and (root / "masks").is_dir()):
        raise UserError(
            f"{root} has no masks: it needs the folders images and masks, or CamVid's train and trainannot, or "
            f"PASCAL VOC's JPEGImages, SegmentationClass and ImageSets."
        )
    return _pairs(root.name, root / "images", root / "masks")


def count_classes(images: ImageSet, wanted: int | None, ignore: Sequence[int] = ()) -> int:
    """How many classes masks may show: as asked for, as the layout says, or the greatest id in them and one."""
    if wanted is not None:
        return wanted
    if isinstance(images, MaskedFiles) and images.classes:
        return len(images.classes)
    greatest = -1
    for i in range(len(images)):
        try:
            mask = images.mask(i)
        except Unreadable as error:
            raise UserError(f"A mask cannot be read: {error}. Repair or remove it.") from None
        if mask is not None:
            mask = blank(mask, ignore).long()
            greatest = max(greatest, int(mask.masked_fill(mask == IGNORE, -1).max()))
    if greatest < 0:
        ids = ", ".join(str(i) for i in (IGNORE, *ignore))
        raise UserError(f"Every pixel of the masks of {images.name} is ignored ({ids}): nothing to learn.")
    return greatest + 1


def blank(mask: Tensor, ignore: Sequence[int]) -> Tensor:
    """The mask with `IGNORE` in place of the ids `ignore`."""
    if not len(ignore):
        return mask
    return torch.where(torch.isin(mask.long(), torch.tensor(ignore)), IGNORE, mask)


def class_names(images: ImageSet, num_classes: int) -> list[str]:
    """What the ids of the masks mean: the data set's classes, behind a background where there is one, or numbers."""
    names = images.classes
    # Classes named by numbers are labels, which masks need not share.
    if len(names) == num_classes - 1 and not names[0].isdigit():
        names = ["background", *names]
    return names if len(names) == num_classes else [str(i) for i in range(num_classes)]


def require_same_size(picture: Tensor, mask: Tensor | None, where: str) -> Tensor:
    """The mask, or a sentence if it is missing or of another size than its picture."""
    if mask is None:
        raise UserError(f"{where} has no mask. Give each image a mask.")
    if picture.shape[-2:] != mask.shape:
        a, b = (" x ".join(map(str, shape)) for shape in (mask.shape, picture.shape[-2:]))
        raise UserError(
            f"The mask of {where} is {a} and its image {b} (height x width). Give each image a mask of its own size."
        )
    return mask


def _pairs(name: str, pictures: Path, masks: Path) -> MaskedFiles:
    """The pictures of one folder and the masks of the same stem in another."""
    if not pictures.is_dir():
        raise UserError(f"{masks} has masks, but their images are missing: there is no folder {pictures}.")
    files, by_stem = _image_files(pictures), {path.stem: path for path in _image_files(masks)}
    if not files:
        raise UserError(f"No images in {pictures}.")
    if missing := [path.name for path in files if path.stem not in by_stem]:
        raise UserError(f"{masks} has no mask for {few(missing)}. Give each image a mask of the same name.")
    return MaskedFiles(name, [(path, by_stem[path.stem]) for path in files], [])


def _image_files(folder: Path) -> list[Path]:
    paths = sorted(folder.iterdir())
    return [path for path in paths if path.suffix[1:].lower() in EXTENSIONS and path.is_file()]


def _voc(root: Path, split: str) -> MaskedFiles:
    lists = root / "ImageSets" / "Segmentation"
    for name in _VOC_LISTS[split]:
        # The 10,582 images of trainaug have their masks in a folder that VOC itself does not bring.
        masks, file = root / f"SegmentationClass{'Aug' * (name == 'trainaug')}", lists / f"{name}.txt"
        if file.is_file() and masks.is_dir():
            break
    else:
        raise MissingSplitError(f"{root} is laid out as PASCAL VOC, but {file} is missing.")
    stems = file.read_text().split()
    pairs = [(root / "JPEGImages" / f"{stem}.jpg", masks / f"{stem}.png") for stem in stems]
    if not pairs:
        raise UserError(f"{file} names no images.")
    absent = next((path for pair in pairs for path in pair if not path.is_file()), None)
    if absent is not None:
        raise UserError(f"{absent} is missing, though {file} names it.")
    return MaskedFiles(f"{root.name}-{name}", pairs, VOC_CLASSES)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else -1
