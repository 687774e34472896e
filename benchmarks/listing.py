"""What a run needs to know of a folder of ImageNet's size before its first step: processor time and memory.

    python benchmarks/listing.py                      # 1,281,167 files in 1,000 folders: ten minutes, no room
    python benchmarks/listing.py --images 20000

Makes a tree of sparse files with names and sizes like ImageNet's, in --folder or among the temporary files, and
removes it afterwards. What is compared:

    run          find all files, their sizes and times, the fingerprint, hash 4,096 files, make the listing to keep
    resume       find all files again, compare them with that listing, hash 4,096 files
    strings      the facts of `run` with os.walk and strings, os.stat, and one line of JSON for each file
    ImageFolder  torchvision's: names alone, without sizes, times, fingerprint
    floor        os.scandir and one os.stat for each file, nothing kept

Each in a process of its own, taking turns; the file system's cache is warm. Seconds are processor time, of user and
kernel together and of all threads; the median of the rounds.
"""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from _report import extra_memory, options, report, resident_gb
from torchvision.datasets import ImageFolder

from adasim.data import FolderImages, check_same_data, describe, open_images, record
from adasim.data.identity import SAMPLED_FILES, listing_file
from adasim.data.image_folder import Listing
from adasim.data.images import sample_ids
from adasim.util.rgb import hash_file

GOAL = 10.0  # seconds of processor time, to list and fingerprint ImageNet
CLASSES = 1000


def make_tree(root: Path, images: int) -> None:
    """Sparse files: they take an inode each, and no room."""
    for c in range(CLASSES):
        name = f"n{1440764 + 13337 * c:08d}"
        (root / name).mkdir()
        folder = os.open(root / name, os.O_RDONLY)
        for i in range(c, images, CLASSES):
            file = os.open(f"{name}_{i * 7919 % 100_003}_{i}.JPEG", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
            os.ftruncate(file, 50_000 + i * 7919 % 120_000)
            os.close(file)
        os.close(folder)


def begin(root: str) -> tuple[FolderImages, str, bytes]:
    images = open_images(root)
    assert isinstance(images, FolderImages)
    describe(images)
    facts, listing = json.dumps(record(images)), listing_file(images)
    assert listing is not None
    return images, facts, listing


def resume(root: str, facts: str, listing: bytes) -> FolderImages:
    saved = json.loads(facts)
    before = Listing.read(io.BytesIO(listing), saved["fingerprint"])
    assert before is not None
    images = FolderImages(root)
    assert "modification times of all" in check_same_data(saved, images, listing=before)
    return images


def strings(root: str) -> list[str]:
    """As one would write it down at first."""
    paths, lines, times = [], [], []
    for folder, folders, files in os.walk(root):
        folders.sort()
        for name in sorted(files):
            if name.lower().endswith((".jpg", ".jpeg", ".png")):
                path = os.path.join(folder, name)
                state = os.stat(path)
                paths.append(path)
                lines.append(f"{path[len(root) + 1 :]} {state.st_size}")
                times.append(state.st_mtime_ns)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    sample = [hash_file(paths[i], whole=False) for i in sample_ids(len(paths), SAMPLED_FILES)]
    json.dumps({"fingerprint": digest, "listing": lines, "times": times, "sample": sample})
    return paths


def floor(root: str) -> int:
    total = 0
    for top in os.scandir(root):
        folder = os.open(top.path, os.O_RDONLY)
        with os.scandir(folder) as entries:
            for entry in entries:
                total += os.stat(entry.name, dir_fd=folder).st_size
        os.close(folder)
    return total


def measured(work: Callable[[], Any], keeps: Callable[[Any], Any]) -> dict[str, float]:
    """In a process of its own: seconds of processor time, memory at the peak, and what is kept in the end."""
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        before = resident_gb()
        start = time.process_time()
        result, peak = extra_memory(work)
        taken = time.process_time() - start
        kept = keeps(result)
        del result
        found = {"CPU s": taken, "peak GB": peak, "kept GB": resident_gb() - before}
        queue.put({**found, "MB to a worker": len(ForkingPickler.dumps(kept)) / 1e6})

    process = context.Process(target=child)
    process.start()
    found = queue.get()
    process.join()
    return found


def main() -> None:
    args = options(__doc__, images=1_281_167, rounds=3, folder=None)
    root = tempfile.mkdtemp(prefix="adasim-listing-", dir=args.folder)
    try:
        print(f"making {args.images:,} files in {root}", flush=True)
        make_tree(Path(root), args.images)
        _, facts, listing = begin(root)
        contenders: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
            "run": (lambda: begin(root), lambda found: found[0]),
            "resume": (lambda: resume(root, facts, listing), lambda images: images),
            "strings": (lambda: strings(root), lambda paths: paths),
            "ImageFolder": (lambda: ImageFolder(root), lambda images: images.samples),
            "floor": (lambda: floor(root), lambda total: total),
        }
        times: dict[str, list[dict[str, float]]] = {name: [] for name in contenders}
        for _ in range(args.rounds):
            for name, (work, keeps) in contenders.items():
                times[name].append(measured(work, keeps))
                print(f"{name}: {times[name][-1]}", flush=True)
    finally:
        shutil.rmtree(root)
    rows: list[dict[str, Any]] = []
    for name, found in times.items():
        medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
        over = statistics.median(
            one["CPU s"] / bare["CPU s"] for one, bare in zip(found, times["floor"], strict=True)
        )
        rows.append({"what": name, "CPU s": medians.pop("CPU s"), "times the floor": over, **medians})
    rows[0]["goal: CPU s"] = GOAL
    settings = {
        "images": args.images,
        "folders": CLASSES,
        "rounds": args.rounds,
        "listing MB": len(listing) / 1e6,
    }
    report("listing", settings, rows)


if __name__ == "__main__":
    main()
