"""The other side of peers.py: lightly's SimSiam and DINO, as its documentation trains them.

Nothing here knows of AdaSim. The encoders are handed in, so that both sides train the same torch modules.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightly.loss import DINOLoss, NegativeCosineSimilarity
from lightly.models.modules import DINOProjectionHead, SimSiamPredictionHead, SimSiamProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import DINOTransform, SimSiamTransform
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

PhotoViews = Callable[[Image.Image], list[Tensor]]


class Photos(Dataset[list[Tensor]]):
    """Arrays (H, W, 3) as torchvision's CIFAR-10 hands them out: each is made a PIL image, then its two views."""

    def __init__(self, arrays: np.ndarray, transform: PhotoViews) -> None:
        self.arrays, self.transform = arrays, transform

    def __len__(self) -> int:
        return len(self.arrays)

    def __getitem__(self, i: int) -> list[Tensor]:
        return self.transform(Image.fromarray(self.arrays[i]))


class LightlySimSiam:
    """lightly's SimSiam: encoder, its two heads, its transform, a DataLoader, SGD."""

    def __init__(
        self,
        encoder: nn.Module,
        widths: tuple[int, int, int],
        arrays: np.ndarray,
        batch_size: int,
        sgd: dict[str, Any],
        transform: dict[str, Any],
        channels_last: bool,
    ) -> None:
        dim, proj_dim, pred_dim = widths
        self.encoder = copy.deepcopy(encoder)
        self.projector = SimSiamProjectionHead(dim, proj_dim, proj_dim)
        self.predictor = SimSiamPredictionHead(proj_dim, pred_dim, proj_dim)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        model = nn.ModuleList([self.encoder, self.projector, self.predictor])
        model.train().to(memory_format=self.format)
        self.optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], **sgd)
        self.criterion = NegativeCosineSimilarity()
        views: Any = SimSiamTransform(input_size=arrays.shape[1], **transform)
        photos = Photos(arrays, views)
        self.loader = DataLoader(photos, batch_size, shuffle=True, drop_last=True, num_workers=0)

    def train(self, steps: int) -> int:
        """Train for a number of steps; returns how many images were seen."""
        images, total_loss = 0, torch.zeros(())
        for views in islice(self.loader, steps):
            z0, p0 = self.forward(views[0])
            z1, p1 = self.forward(views[1])
            loss = 0.5 * (self.criterion(z0, p1) + self.criterion(z1, p0))
            total_loss += loss.detach()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            images += len(views[0])
        return images

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        feature = self.encoder(pixels.to(memory_format=self.format)).flatten(start_dim=1)
        z = self.projector(feature)
        return z.detach(), self.predictor(z)


class LightlyDino:
    """lightly's DINO with two views: student and teacher, its head, loss, centre and moving average, AdamW."""

    def __init__(self, student: nn.Module, teacher: nn.Module, dim: int, head: dict[str, Any]) -> None:
        self.student, self.teacher = copy.deepcopy(student).train(), copy.deepcopy(teacher).train()
        self.student_head = DINOProjectionHead(dim, **head, freeze_last_layer=1, norm_last_layer=False)
        self.teacher_head = DINOProjectionHead(dim, **head, norm_last_layer=False)
        deactivate_requires_grad(self.teacher)
        deactivate_requires_grad(self.teacher_head)
        self.criterion = DINOLoss(head["output_dim"], warmup_teacher_temp_epochs=5)
        parameters = [*self.student.parameters(), *self.student_head.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-4)

    def step(self, views: list[Tensor], epoch: int) -> None:
        update_momentum(self.student, self.teacher, m=0.996)
        update_momentum(self.student_head, self.teacher_head, m=0.996)
        taught = [self.teacher_head(self.teacher(view).flatten(start_dim=1)) for view in views]
        learned = [self.student_head(self.student(view).flatten(start_dim=1)) for view in views]
        loss = self.criterion(taught, learned, epoch=epoch)
        loss.backward()
        self.student_head.cancel_last_layer_gradients(current_epoch=epoch)
        self.optimizer.step()
        self.optimizer.zero_grad()


def lightly_dino_views() -> PhotoViews:
    """lightly's DINO transform at its defaults, without local views."""
    views: Any = DINOTransform(n_local_views=0)
    return views


def from_files(paths: list[str], transform: PhotoViews) -> Iterator[list[Tensor]]:
    """Views of image files, read as torchvision's ImageFolder reads them."""
    for path in paths:
        with open(path, "rb") as file, Image.open(file) as image:
            yield transform(image.convert("RGB"))
