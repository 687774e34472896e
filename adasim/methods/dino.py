"""DINO: a student learns the sharpened, centred output of its own moving average (Caron et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adasim.config import Config, ModelConfig, OptimConfig
from adasim.errors import UserError
from adasim.fields import at_least, between, check_fields
from adasim.methods.base import EncodedView, Method, Step, decay_groups
from adasim.models import Backbone, DinoHead, build_backbone
from adasim.models.backbones import check_patches
from adasim.ranks.exchange import mean_over_ranks
from adasim.registry import METHODS
from adasim.schedules import cosine
from adasim.spread import feature_spread


@dataclass(kw_only=True)
class DinoSettings:
    """DINO's head, temperatures and teacher."""

    out_dim: int = 65536
    """Prototypes: width of the head's output."""
    hidden_dim: int = 2048
    """Width of the head's two hidden layers."""
    bottleneck_dim: int = 256
    """Width of the normalised layer before the prototypes."""
    norm_last_layer: bool = False
    """Freeze the gains of the weight-normed last layer at 1."""
    freeze_last_layer_epochs: int = 1
    """Epochs in which the last layer does not learn."""
    student_temp: float = 0.1
    """Temperature of the student's softmax."""
    teacher_temp_start: float = 0.04
    """Teacher temperature at the first epoch."""
    teacher_temp: float = 0.07
    """Teacher temperature after its warm-up."""
    teacher_temp_warmup_epochs: int = 30
    """Epochs over which the teacher temperature rises linearly."""
    teacher_momentum: float = 0.996
    """Start of the teacher's moving-average momentum; a cosine takes it to 1."""
    center_momentum: float = 0.9
    """Momentum of the running centre of the teacher's logits."""

    def __post_init__(self) -> None:
        check_fields(self, "dino.")
        for name in ("out_dim", "hidden_dim", "bottleneck_dim"):
            at_least(f"dino.{name}", getattr(self, name), 2)
        for name in ("student_temp", "teacher_temp_start", "teacher_temp"):
            if getattr(self, name) <= 0:
                raise UserError(f"dino.{name}={getattr(self, name)} must be above 0.")
        between("dino.teacher_momentum", self.teacher_momentum, 0, 1)
        between("dino.center_momentum", self.center_momentum, 0, 1)


class Network(nn.Module):
    """Backbone and head."""

    def __init__(self, backbone: Backbone, config: DinoSettings) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = DinoHead(
            backbone.dim,
            config.out_dim,
            hidden_dim=config.hidden_dim,
            bottleneck_dim=config.bottleneck_dim,
            norm_last_layer=config.norm_last_layer,
        )


@METHODS.register("dino")
class Dino(Method):
    """Student and teacher start equal; only the student has stochastic depth and gradients.

    The teacher stays in train mode: its batch norm uses the batch, and its running statistics come from its
    own forward passes, not from the student's.
    """

    Settings = DinoSettings
    VIEWS: ClassVar = {  # Caron et al., 2021: two different views
        "interpolation": "bicubic",
        "jitter": (0.4, 0.4, 0.2, 0.1),
        "blur_p": (1.0, 0.1, 0.5),
        "solarize_p": (0.0, 0.2),
    }
    takes_local_views = True
    follows_total = ("teacher's momentum",)
    center: Tensor

    def __init__(self, model: ModelConfig, config: DinoSettings, image_size: int, channels: int = 3) -> None:
        super().__init__()
        self.config = config
        self.student = Network(build_backbone(model, image_size, channels, student=True), config)
        self.teacher = Network(build_backbone(model, image_size, channels, student=False), config)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)
        self.register_buffer("center", torch.zeros(1, config.out_dim))
        self._mean_logits: list[
            Tensor
        ] = []  # of each micro-batch; they wait until the step is known to be sound

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.views.local_crops:
            check_patches(config.model, "views.local_size", config.views.local_size)

    @property
    def eval_encoder(self) -> Backbone:
        return self.teacher.backbone

    @property
    def output_width(self) -> int:
        return self.config.out_dim

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
    def encode(self, view: Tensor) -> EncodedView:
        feature = self.teacher.backbone(view)
        return EncodedView(view, feature.float(), target=self.teacher.head(feature))

    def predict(self, view: EncodedView) -> None:
        view.output = self.student.head(self.student.backbone(view.pixels))

    def loss(self, views: list[EncodedView], epoch: int) -> Step:
        return self._step([v.target for v in views[:2]], [v.output for v in views], views[0].feature, epoch)

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
        mean_logit = mean_over_ranks(torch.cat(targets).float().mean(dim=0, keepdim=True))  # (1, out_dim)
        if not self.continues_step:
            self._mean_logits.clear()
        self._mean_logits.append(mean_logit)
        diagnostics = {
            "teacher_entropy": entropy,
            "kl": loss.detach() - entropy,  # each teacher view stands in equally many terms
            "feature_spread": feature_spread(feature),
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
        if self._mean_logits:
            weight = self.config.center_momentum
            mean_logit = torch.stack(self._mean_logits).mean(dim=0)
            self.center.copy_(self.center * weight + mean_logit * (1 - weight))
            self._mean_logits.clear()
        momentum = teacher_momentum(self.config.teacher_momentum, step, total_steps)
        teacher, student = tuple(self.teacher.parameters()), tuple(self.student.parameters())
        torch._foreach_mul_(teacher, momentum)
        torch._foreach_add_(teacher, student, alpha=1 - momentum)

    def schedules(self, epoch: int, step: int, total_steps: int) -> dict[str, float]:
        return {
            "teacher_temp": teacher_temperature(self.config, epoch),
            "teacher_momentum": teacher_momentum(self.config.teacher_momentum, step, total_steps),
        }

    def param_groups(self, optim: OptimConfig) -> list[dict[str, Any]]:
        return decay_groups(self.student.named_parameters(), optim)


def teacher_momentum(start: float, step: int, total_steps: int) -> float:
    """Momentum of the teacher's moving average: a cosine from `start` to 1, every step."""
    return cosine(start, 1.0, step, total_steps)


def teacher_temperature(settings: DinoSettings, epoch: int) -> float:
    """linspace(start, end, n)[epoch] over the n epochs of its warm-up, then the end."""
    n, start, end = settings.teacher_temp_warmup_epochs, settings.teacher_temp_start, settings.teacher_temp
    if epoch >= n:
        return end
    return start + (end - start) * epoch / max(n - 1, 1)
