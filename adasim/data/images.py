"""What every data set of images looks like to the rest of the package, and the one that lives in memory."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod

import torch
from torch import Tensor


class Unreadable(Exception):  # noqa: N818  (a state of the file, as the quarantine reports it)
    """An image that cannot be decoded: `where` it is and the `reason`."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            where, reason
        )  # both, so that the exception survives a trip through a worker's pickle
        self.where = where
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}"


class ImageSet(ABC):
    """N images, numbered 0..N-1 in an order that never changes.

    `labels` is int64 (N,) or None; `classes` names them. `load` gives one image as uint8 (3, H, W).
    """

    name: str
    labels: Tensor | None = None
    classes: list[str]

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def load(self, i: int) -> Tensor:
        """Image i as RGB, uint8 (3, H, W). Raises `Unreadable`."""

    @abstractmethod
    def listing(self) -> list[str]:
        """One line per image (or per run of images) that changes when the image does: for messages about what
        differs between two states of a data set."""

    def where(self, i: int) -> str:
        """Where image i is, for people: its path, or `name[i]`."""
        return f"{self.name}[{i}]"

    def mask(self, i: int) -> Tensor | None:
        """The segmentation mask of image i, uint8 (H, W), or None where there is none."""
        return None

    def as_array(self) -> Tensor | None:
        """All images as one uint8 (N, C, H, W) when they already are in memory, else None. C may be 1."""
        return None

    def fingerprint(self) -> str:
        """sha256 over the listing and the labels: two data sets with one fingerprint train alike."""
        digest = hashlib.sha256()
        for line in self.listing():
            digest.update(line.encode("utf-8", "surrogateescape") + b"\n")
        if self.labels is not None:
            digest.update(self.labels.numpy().tobytes())
        return digest.hexdigest()


class ArrayImages(ImageSet):
    """Images of one size in memory: uint8 (N, C, H, W) with C of 1 or 3; masks uint8 (N, H, W)."""

    CHUNK = 1024  # images per line of the listing

    def __init__(
        self,
        name: str,
        images: Tensor,
        labels: Tensor | None = None,
        classes: list[str] | None = None,
        masks: Tensor | None = None,
    ) -> None:
        self.name = name
        self.images = images
        self.labels = None if labels is None else labels.to(torch.int64)
        self.classes = classes or _numbered(self.labels)
        self.masks = masks

    def __len__(self) -> int:
        return len(self.images)

    def load(self, i: int) -> Tensor:
        return self.images[i].expand(3, -1, -1)

    def mask(self, i: int) -> Tensor | None:
        return None if self.masks is None else self.masks[i]

    def as_array(self) -> Tensor:
        return self.images

    def listing(self) -> list[str]:
        lines = []
        for start in range(0, len(self), self.CHUNK):
            chunk = self.images[start : start + self.CHUNK].contiguous()
            digest = hashlib.sha256(chunk.numpy().tobytes()).hexdigest()
            lines.append(f"{self.name}[{start}:{start + len(chunk)}] {tuple(chunk.shape[1:])} {digest}")
        return lines


def _numbered(labels: Tensor | None) -> list[str]:
    return [] if labels is None or not len(labels) else [str(c) for c in range(int(labels.max()) + 1)]
