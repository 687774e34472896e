"""The paper's data sets, from their official archives to what `adasim eval` reads.

    python -m benchmarks.paper.prepare pets downloads/pets data/pets               # DEST/CLASS/NUMBER.jpg, all splits
    python -m benchmarks.paper.prepare voc downloads data/voc                      # with the masks of SBD: trainaug
    python -m benchmarks.paper.prepare coco-things downloads/coco data/coco-things --share 0.1
    python -m benchmarks.paper.prepare cifar10 downloads data/cifar10   # torchvision's, downloaded if absent

SOURCE is the folder in which the archives of a data set were unpacked, with the names that they bring; nothing in it
is changed. Pictures are linked where SOURCE and DEST share a disk, else copied. What must lie in SOURCE, by NAME:

    aircraft      fgvc-aircraft-2013b/          of fgvc-aircraft-2013b.tar.gz; classes are its 100 variants
    caltech101    101_ObjectCategories/         of caltech-101.zip; 102 classes, its background among them
    cars          cars_train/ cars_test/ devkit/ and cars_test_annos_withlabels.mat, of Stanford Cars
    dtd           dtd/                          of dtd-r1.0.1.tar.gz
    flowers       jpg/ imagelabels.mat          of Oxford Flowers 102
    food101       food-101/                     of food-101.tar.gz
    pets          images/ annotations/          of Oxford-IIIT Pet
    sun397        SUN397/ and, for the paper's split 01, Training_01.txt and Testing_01.txt (of Partitions.zip)
    voc           VOC2012/ and, for trainaug, SBD's cls/ with train.txt and val.txt (of benchmark.tgz)
    coco-things   train2017/ val2017/ (pictures), stuffthingmaps/ with train2017/ and val2017/ in it (masks, of
    coco-stuff    stuffthingmaps_trainval2017.zip), annotations/instances_val2017.json and stuff_val2017.json
    cifar10, fashion-mnist                      torchvision's; made as DEST/train/CLASS and DEST/test/CLASS

Cars, Flowers and SBD are described in Matlab's files, which scipy reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from adasim.util import seeding
from adasim.util.errors import UserError

IGNORE = 255
Picture = tuple[Path, str]
"""A file, and the name of its class."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted([*CLASSES, *MASKS, *TORCHVISION]))
    parser.add_argument("source", type=Path, help="where the archives were unpacked")
    parser.add_argument("dest", type=Path, help="the folder to make")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of COCO's training images; Leopart takes 0.1"
    )
    args = parser.parse_args()
    try:
        prepare(args.name, args.source, args.dest, args.share)
    except UserError as error:
        sys.exit(f"{error}")


def prepare(name: str, source: Path, dest: Path, share: float = 1.0) -> None:
    """Make DEST; says what came of it, and what is published where that differs."""
    if dest.exists() and any(dest.iterdir()):
        raise UserError(f"{dest} is there already and not empty. Choose another folder.")
    if not 0 < share <= 1:
        raise UserError(f"--share {share} must be above 0, and at most 1.")
    if name in TORCHVISION:
        return from_torchvision(TORCHVISION[name], source, dest)
    if name in MASKS:
        return MASKS[name](source, dest, share)
    pictures, published = CLASSES[name]
    classes, images = lay_out(pictures(source), dest)
    print(f"{dest}: {images:,} images in {classes} classes.")
    if (classes, images) != (published[0], published[1] or images):
        print(
            f"The published set has {f'{published[1]:,} images in ' if published[1] else ''}{published[0]} classes."
        )


# ---- classes: (file, class) of all splits together ----


def aircraft(source: Path) -> Iterator[Picture]:
    data = find(source, "fgvc-aircraft-2013b") / "data"
    for split in ("train", "val", "test"):
        for line in (data / f"images_variant_{split}.txt").read_text().splitlines():
            number, _, variant = line.partition(" ")
            yield data / "images" / f"{number}.jpg", variant


def cars(source: Path) -> Iterator[Picture]:
    meta = find(source, "cars_meta.mat")
    names = matlab(meta)["class_names"].tolist()
    lists = {"cars_train": meta.with_name("cars_train_annos.mat")}
    lists["cars_test"] = find(source, "cars_test_annos_withlabels.mat")
    for folder, file in lists.items():
        for line in np.atleast_1d(matlab(file)["annotations"]):
            yield find(source, folder) / str(line["fname"]), names[int(line["class"]) - 1]


def flowers(source: Path) -> Iterator[Picture]:
    """The archive has numbers instead of names."""
    file = find(source, "imagelabels.mat")
    for number, label in enumerate(matlab(file)["labels"].tolist(), 1):
        yield find(source, "jpg") / f"image_{number:05d}.jpg", f"{label:03d}"


def pets(source: Path) -> Iterator[Picture]:
    annotations = find(source, "annotations")
    for split in ("trainval", "test"):
        for line in (annotations / f"{split}.txt").read_text().splitlines():
            stem = line.split()[0]
            yield annotations.with_name("images") / f"{stem}.jpg", stem.rpartition("_")[0]


def sun397(source: Path) -> Iterator[Picture]:
    """Of its split 01, 50 images of each class for training and 50 for testing; all images where its lists lack."""
    root = find(source, "SUN397")
    lists = [found for name in ("Training_01.txt", "Testing_01.txt") for found in sorted(source.rglob(name))]
    if len(lists) == 2:
        files = [root / line.strip().lstrip("/") for file in lists for line in file.read_text().splitlines()]
    else:
        print(
            "Training_01.txt and Testing_01.txt are not there: all images are taken, not the paper's split 01."
        )
        files = sorted(root.rglob("sun_*.jpg"))
    for file in files:
        yield file, "/".join(file.relative_to(root).parts[1:-1])  # without the letter: a/abbey, o/office/home


def folders(name: str) -> Callable[[Path], Iterator[Picture]]:
    """An archive that has a folder for each class, all splits in it."""

    def pictures(source: Path) -> Iterator[Picture]:
        root = find(source, name)
        root = root / "images" if (root / "images").is_dir() else root
        for file in sorted(root.rglob("*.jpg")):
            yield file, file.parent.name

    return pictures


CLASSES: dict[str, tuple[Callable[[Path], Iterator[Picture]], tuple[int, int | None]]] = {
    "aircraft": (aircraft, (100, 10_000)),
    "caltech101": (folders("101_ObjectCategories"), (102, None)),
    "cars": (cars, (196, 16_185)),
    "dtd": (folders("dtd"), (47, 5_640)),
    "flowers": (flowers, (102, 8_189)),
    "food101": (folders("food-101"), (101, 101_000)),
    "pets": (pets, (37, 7_349)),
    "sun397": (sun397, (397, 39_700)),
}
"""The eight few-shot sets, and how many classes and images are published of each; of Caltech's, figures differ."""


# ---- masks ----


def voc(source: Path, dest: Path, share: float) -> None:
    """PASCAL VOC 2012 with the masks of SBD: train and trainaug without val, as everybody does; val."""
    root = find(source, "VOC2012")
    lists = {name: _stems(root / "ImageSets" / "Segmentation" / f"{name}.txt") for name in ("train", "val")}
    extra: dict[str, Path] = {}
    if found := sorted(path for path in source.rglob("cls") if path.is_dir()):
        described = {stem for name in ("train", "val") for stem in _stems(found[0].with_name(f"{name}.txt"))}
        extra = {
            stem: found[0] / f"{stem}.mat"
            for stem in sorted(described - set(lists["train"]) - set(lists["val"]))
        }
        lists["trainaug"] = sorted([*lists["train"], *extra])
    else:
        print("SBD's folder cls is not there: only VOC's own 1,464 training images are taken, not trainaug.")
    for folder in ("JPEGImages", "SegmentationClass", "SegmentationClassAug", "ImageSets/Segmentation"):
        (dest / folder).mkdir(parents=True)
    for stem in (*lists["train"], *lists["val"], *extra):
        place(root / "JPEGImages" / f"{stem}.jpg", dest / "JPEGImages" / f"{stem}.jpg")
    for stem in (*lists["train"], *lists["val"]):
        place(root / "SegmentationClass" / f"{stem}.png", dest / "SegmentationClass" / f"{stem}.png")
    for stem in lists["train"] if extra else ():
        place(root / "SegmentationClass" / f"{stem}.png", dest / "SegmentationClassAug" / f"{stem}.png")
    for stem, file in extra.items():
        mask = matlab(file)["GTcls"]["Segmentation"].item()
        Image.fromarray(np.asarray(mask, dtype=np.uint8)).save(dest / "SegmentationClassAug" / f"{stem}.png")
    for name, stems in lists.items():
        (dest / "ImageSets" / "Segmentation" / f"{name}.txt").write_text("\n".join(stems) + "\n")
    print(f"{dest}: {', '.join(f'{len(stems):,} images in {name}' for name, stems in lists.items())}.")


def coco(kind: str) -> Callable[[Path, Path, float], None]:
    """COCO's things or stuff as their coarse classes (12 and 15 super-categories), everything else ignored."""

    def make(source: Path, dest: Path, share: float) -> None:
        coarse, names = coarse_classes(
            find(source, f"{'instances' if kind == 'things' else 'stuff'}_val2017.json")
        )
        for split in ("train", "val"):
            masks = next(p for p in sorted(source.rglob(f"{split}2017")) if any(p.glob("*.png")))
            pictures = next(p for p in sorted(source.rglob(f"{split}2017")) if any(p.glob("*.jpg")))
            files = sorted(masks.glob("*.png"))
            if split == "train" and share < 1:
                order = seeding.permutation(0, "share of COCO", 0, len(files))
                files = [files[i] for i in sorted(order[: round(share * len(files))].tolist())]
            for folder in ("images", "masks"):
                (dest / split / folder).mkdir(parents=True)
            for file in files:
                place(pictures / f"{file.stem}.jpg", dest / split / "images" / f"{file.stem}.jpg")
                with Image.open(file) as image:
                    mask = coarse[np.asarray(image)]
                Image.fromarray(mask).save(dest / split / "masks" / file.name)
            print(f"{dest / split}: {len(files):,} images.")
        (dest / "classes.txt").write_text("".join(f"{number} {name}\n" for number, name in enumerate(names)))
        print(
            f"{len(names)} classes: {', '.join(names)}. For adasim eval segmentation: --classes {len(names)}"
        )

    return make


def coarse_classes(annotations: Path) -> tuple[np.ndarray, list[str]]:
    """A table from the values of COCO-Stuff's masks, which are a category's id less one, to coarse classes.

    `other`, under which the file of stuff has all things, is no class.
    """
    table = np.full(256, IGNORE, dtype=np.uint8)
    names: list[str] = []
    for category in sorted(json.loads(annotations.read_text())["categories"], key=lambda one: one["id"]):
        coarse = category["supercategory"]
        if coarse == "other":
            continue
        if coarse not in names:
            names.append(coarse)
        table[category["id"] - 1] = names.index(coarse)
    return table, names


MASKS = {"voc": voc, "coco-things": coco("things"), "coco-stuff": coco("stuff")}

# ---- torchvision's small ones ----

TORCHVISION = {"cifar10": "CIFAR10", "fashion-mnist": "FashionMNIST"}


def from_torchvision(name: str, source: Path, dest: Path) -> None:
    from torchvision import datasets

    for split in ("train", "test"):
        images = getattr(datasets, name)(source, train=split == "train", download=True)
        save(images, images.classes, dest / split)


def save(images: Iterable[tuple[Any, int]], classes: list[str], dest: Path) -> None:
    """Save (PIL image, label) pairs as DEST/CLASS/NUMBER.png; the number is the place in the published order."""
    names = [safe(name) for name in classes]  # Fashion-MNIST has a "T-shirt/top"
    for name in names:
        (dest / name).mkdir(parents=True, exist_ok=True)
    for number, (image, label) in enumerate(images):
        image.save(dest / names[label] / f"{number:05d}.png")


# ---- files ----


def lay_out(pictures: Iterable[Picture], dest: Path) -> tuple[int, int]:
    """DEST/CLASS/NUMBER.jpg, each file once; returns how many classes and images there are."""
    placed: dict[Path, str] = {}
    for file, label in pictures:
        if file in placed:  # the lists of some sets name files twice: a query would equal its support
            continue
        folder = dest / safe(label)
        folder.mkdir(parents=True, exist_ok=True)
        place(file, folder / f"{len(placed):06d}{file.suffix.lower()}")
        placed[file] = label
    return len(set(placed.values())), len(placed)


def place(file: Path, to: Path) -> None:
    """A link to the same bytes, or a copy where the disks differ."""
    if not file.is_file():
        raise UserError(f"{file} is missing. Unpack the archive again.")
    try:
        os.link(file, to)
    except OSError:
        shutil.copyfile(file, to)


def find(source: Path, name: str) -> Path:
    """The file or folder of that name in SOURCE, however deep the archive has put it."""
    if source.name == name and source.exists():
        return source
    found = next(iter(sorted(source.rglob(name))), None)
    if found is None:
        raise UserError(f"There is no {name} in {source}. See: python -m benchmarks.paper.prepare --help")
    return found


def matlab(file: Path) -> Any:
    try:
        from scipy.io import loadmat
    except ImportError:
        raise UserError(f"{file} is Matlab's, which scipy reads: pip install scipy") from None
    return loadmat(file, squeeze_me=True)


def safe(name: str) -> str:
    """A class's name as that of a folder."""
    return name.replace("/", "-")


def _stems(file: Path) -> list[str]:
    if not file.is_file():
        raise UserError(f"{file} is missing. Unpack the archive again.")
    return file.read_text().split()


if __name__ == "__main__":
    main()
