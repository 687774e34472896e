"""DINO: a student learns the sharpened, centred output of its own moving average (Caron et al., 2021)."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adasim.config import DinoConfig, ModelConfig, OptimConfig
from adasim.methods.base import Method, Seen, Step, decay_groups, feature_spread
from adasim.models import Backbone, DinoHead, build_backbone
from adasim.ranks.exchange import mean_over_ranks
from adasim.schedules import teacher_momentum, teacher_temperature


class Network(nn.Module):
    """Backbone and head."""

    def __init__(self, backbone: Backbone, config: DinoConfig) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = DinoHead(
            backbone.dim,
            config.out_dim,
            hidden_dim=config.hidden_dim,
            bottleneck_dim=config.bottleneck_dim,
            norm_last_layer=config.norm_last_layer,
        )


class Dino(Method):
    """Student and teacher start equal; only the student has stochastic depth and gradients.

    The teacher stays in train mode: its batch norm uses the batch, and its running statistics come from its
    own forward passes, not from the student's.
    """

    center: Tensor

    def __init__(self, model: ModelConfig, config: DinoConfig, image_size: int, channels: int = 3) -> None:
        super().__init__()
        self.config = config
        self.student = Network(build_backbone(model, image_size, channels, student=True), config)
        self.teacher = Network(build_backbone(model, image_size, channels, student=False), config)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, config.out_dim))
        self._next_center: Tensor | None = None  # waits until the step is known to be sound

    @property
    def exported(self) -> Backbone:
        return self.teacher.backbone

    def forward(self, views: list[Tensor], epoch: int) -> Step:
        pair = torch.cat(views[:2])  # one forward pass: batch norm sees both global views together
        with torch.no_grad():
            feature = self.teacher.backbone(pair)  # (2B, D)
            target = self.teacher.head(feature)
        features = [self.student.backbone(pair)]
        if len(views) > 2:
            features.append(self.student.backbone(torch.cat(views[2:])))  # local views share a resolution
        outputs = self.student.head(torch.cat(features)).chunk(len(views))
        return self._step(list(target.chunk(2)), list(outputs), feature.chunk(2)[0].float(), epoch)

    @torch.no_grad()
    def see(self, view: Tensor) -> Seen:
        feature = self.teacher.backbone(view)
        return Seen(view, feature.float(), target=self.teacher.head(feature))

    def answer(self, seen: Seen) -> None:
        seen.output = self.student.head(self.student.backbone(seen.view))

    def loss(self, seen: list[Seen], epoch: int) -> Step:
        return self._step([s.target for s in seen[:2]], [s.output for s in seen], seen[0].feature, epoch)

    def _step(self, targets: list[Tensor], outputs: list[Tensor], feature: Tensor, epoch: int) -> Step:
        """Mean of H(teacher view t, student view s) over all t != s: for two views, the symmetric loss."""
        temperature = teacher_temperature(self.config, epoch)
        teacher = [F.softmax((logits.float() - self.center) / temperature, dim=1) for logits in targets]
        student = [F.log_softmax(logits.float() / self.config.student_temp, dim=1) for logits in outputs]
        terms = [
            -(p * log_q).sum(dim=1).mean()
            for t, p in enumerate(teacher)
            for s, log_q in enumerate(student)
            if s != t
        ]
        loss = torch.stack(terms).mean()
        entropy = torch.stack([torch.special.entr(p).sum(dim=1).mean() for p in teacher]).mean()
        momentum = self.config.center_momentum
        mean_logit = mean_over_ranks(torch.cat(targets).float().mean(dim=0, keepdim=True))  # (1, out_dim)
        self._next_center = self.center * momentum + mean_logit * (1 - momentum)
        diagnostics = {
            "teacher_entropy": entropy,
            "kl": loss.detach() - entropy,  # each teacher view stands in equally many terms
            "feature_std": feature_spread(feature),
        }
        return Step(loss, feature, diagnostics)

    def before_optimizer(self, epoch: int) -> None:
        """Hold the last layer in its first epochs: without a gradient the optimiser skips it, decay too."""
        if epoch < self.config.freeze_last_layer_epochs:
            for parameter in self.student.head.last_layer.parameters():
                parameter.grad = None

    @torch.no_grad()
    def after_step(self, step: int, total_steps: int) -> None:
        """Commit the centre, then move the teacher's parameters (not its buffers) towards the student's."""
        if self._next_center is not None:
            self.center.copy_(self._next_center)
            self._next_center = None
        momentum = teacher_momentum(self.config.teacher_momentum, step, total_steps)
        teacher, student = tuple(self.teacher.parameters()), tuple(self.student.parameters())
        torch._foreach_mul_(teacher, momentum)
        torch._foreach_add_(teacher, student, alpha=1 - momentum)

    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        return decay_groups(self.student.named_parameters(), optim)
