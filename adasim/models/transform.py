"""What an image goes through before a frozen encoder sees it: resize, centre crop, normalise.

It travels with the encoder under timm's names: `to_timm` is what timm calls a `pretrained_cfg`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import timm.data
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as TF

from adasim.config import Config
from adasim.util.errors import UserError
from adasim.util.rgb import to_tensor

SMALL = 64
"""Up to this side images are taken as they are: enlarging 32 pixels to crop them again only blurs."""

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_ENLARGED = 256 / 224  # DINO's evaluation: the shorter side to 256, of which 224 are kept
_FEWSHOT_ENLARGED = 1.15  # ssl-transfer: both sides to int(1.15 * 224) = 257


@dataclass(frozen=True)
class EvalTransform:
    """The evaluation's view of an image. The same settings and pixels always give the same tensor."""

    size: int
    """Side of the square that the encoder sees."""
    resize: int
    """The shorter side before the centre crop."""
    mean: tuple[float, ...] = _IMAGENET[0]
    std: tuple[float, ...] = _IMAGENET[1]
    interpolation: Literal["bilinear", "bicubic"] = "bicubic"
    squash: bool = False
    """Resize both sides to `resize`, whatever the aspect: the few-shot protocol does, and some of timm's models."""

    @classmethod
    def of_size(
        cls, size: int, mean: tuple[float, ...] = _IMAGENET[0], std: tuple[float, ...] = _IMAGENET[1]
    ) -> EvalTransform:
        """The published geometry at any size: 256 and 224 in proportion, and nothing up to `SMALL` pixels."""
        return cls(size, size if size <= SMALL else round(size * _ENLARGED), tuple(mean), tuple(std))

    @classmethod
    def for_run(cls, config: Config) -> EvalTransform:
        """For the encoder of a run: its own view size and normalisation."""
        return cls.of_size(config.views.size, config.views.mean, config.views.std)

    @classmethod
    def for_timm(cls, model: Any) -> EvalTransform:
        """For a timm model: what its own configuration asks for."""
        return cls.from_timm(timm.data.resolve_model_data_config(model))

    @classmethod
    def from_timm(cls, wanted: dict[str, Any]) -> EvalTransform:
        """The inverse of `to_timm`, and the transform of any `pretrained_cfg`."""
        size = int(wanted["input_size"][-1])
        resize = max(size, int(size / wanted["crop_pct"]))
        bilinear, squash = wanted["interpolation"] == "bilinear", wanted.get("crop_mode") == "squash"
        made = cls(size, resize, tuple(wanted["mean"]), tuple(wanted["std"]), squash=squash)
        return made.bilinear() if bilinear else made

    def to_timm(self) -> dict[str, Any]:
        """The same under timm's names: timm.data.create_transform(**...) makes the same view of a PIL image."""
        share = self.size / self.resize
        if int(self.size / share) != self.resize:  # timm divides again and truncates
            share = self.size / (self.resize + 0.5)
        return {
            "input_size": [3, self.size, self.size],
            "mean": list(self.mean) * (3 // len(self.mean)),
            "std": list(self.std) * (3 // len(self.std)),
            "interpolation": self.interpolation,
            "crop_pct": share,
            **({"crop_mode": "squash"} if self.squash else {}),  # "center" is timm's default
        }

    def at(self, size: int) -> EvalTransform:
        """For another size: the published geometry, or squashed in the same proportion."""
        other = EvalTransform.of_size(size, self.mean, self.std)
        resize = size * self.resize // self.size if self.squash else other.resize
        return replace(other, resize=resize, interpolation=self.interpolation, squash=self.squash)

    def for_fewshot(self) -> EvalTransform:
        """The few-shot protocol's: squashed to a square 1.15 times the size, bilinear, then cropped."""
        resize = self.size if self.size <= SMALL else int(_FEWSHOT_ENLARGED * self.size)
        return replace(self, resize=resize, squash=True, interpolation="bilinear")

    def bilinear(self) -> EvalTransform:
        """The same with SimSiam's interpolation."""
        return replace(self, interpolation="bilinear")

    def for_shape(self, height: int, width: int) -> EvalTransform:
        """The plainest transform that does the same to images of this shape, so that features are shared."""
        if height == width == self.size == self.resize:
            return replace(self, squash=False, interpolation="bicubic")
        return self

    def __call__(self, images: Tensor | Image.Image) -> Tensor:
        """A PIL image, or uint8 (..., C, H, W) with C of 1 or 3, to float32 (..., 3, size, size)."""
        if isinstance(images, Image.Image):
            images = to_tensor(images)
        return self.normalise(self.crop(images))

    def crop(self, images: Tensor) -> Tensor:
        """uint8 (..., C, H, W) to uint8 (..., C, size, size): resized, and the centre cut out."""
        sides = [self.resize] * (2 if self.squash else 1)  # one: the shorter side
        mode = InterpolationMode(self.interpolation)
        resized = TF.resize(
            images, sides, interpolation=mode, antialias=True
        )  # the same images if there is nothing to do
        return TF.center_crop(resized, [self.size, self.size])

    def normalise(self, images: Tensor) -> Tensor:
        """uint8 pixels of any size to float32 with three channels, mean and deviation taken off."""
        if images.dtype != torch.uint8 or images.shape[-3] not in (1, 3):
            raise UserError(
                f"Images are {images.dtype} of shape {tuple(images.shape)}; give uint8 with 1 or 3 channels."
            )
        mean, std = (torch.tensor(v, device=images.device).view(-1, 1, 1) for v in (self.mean, self.std))
        return ((images.float().div_(255) - mean) / std).expand(*images.shape[:-3], 3, -1, -1)
