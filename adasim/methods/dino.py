"""DINO: a student learns the sharpened, centred output of its own moving average (Caron et al., 2021)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adasim.config import Config, ModelConfig, OptimConfig, cosine
from adasim.dist.collectives import mean_over_ranks
from adasim.methods.base import EncodedView, Method, Step, decay_groups
from adasim.models import Backbone, build_backbone
from adasim.models.backbone import check_patches
from adasim.options import DINO_VIEWS, DinoSettings
from adasim.registry import METHODS
from adasim.util.collapse import feature_spread


@METHODS.register("dino")
class Dino(Method):
    """Student and teacher start equal; only the student has stochastic depth and gradients.

    The teacher stays in train mode: its batch norm uses the batch, and its running statistics come from its
    own forward passes, not from the student's.
    """

    Settings = DinoSettings
    VIEWS = DINO_VIEWS
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
        # Of each micro-batch; they wait until the step is known to be sound.
        self._mean_logits: list[Tensor] = []

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.views.local_crops:
            check_patches(config.model, "views.local_size", config.views.local_side)

    @property
    def eval_encoder(self) -> Backbone:
        return self.teacher.backbone

    @property
    def output_width(self) -> int:
        return self.config.out_dim

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> EncodedView:
        feature = self.teacher.backbone(pixels)  # (B, D)
        return EncodedView(pixels, feature.float(), target=self.teacher.head(feature))

    @torch.no_grad()
    def project(self, feature: Tensor) -> Tensor:
        return self.teacher.head(feature)

    def predict(self, view: EncodedView) -> None:
        view.output = self.student.head(self.student.backbone(view.pixels))

    def forward(self, views: list[Tensor], epoch: int, neighbours: Tensor | None = None) -> Step:
        """As `Method.forward`, but with views of one size in one pass: batch norm sees both global views together."""
        pair = self.encode(torch.cat(views[:2]))  # 2B images
        stacks = [pair.pixels, *([torch.cat(views[2:])] if views[2:] else [])]
        outputs = self.student.head(torch.cat([self.student.backbone(x) for x in stacks])).chunk(len(views))
        halves = zip(views[:2], pair.feature.chunk(2), pair.target.chunk(2), strict=True)
        encoded = [EncodedView(*half) for half in halves] + [EncodedView(view) for view in views[2:]]
        for view, output in zip(encoded, outputs, strict=True):
            view.output = output
        if neighbours is not None:
            self.aim_at(neighbours, encoded)
        return self.loss(encoded, epoch)

    def loss(self, views: list[EncodedView], epoch: int) -> Step:
        """Mean of H(teacher view t, student view s) over all t != s: for two views, the symmetric loss."""
        targets, feature = [view.target for view in views[:2]], views[0].feature
        temperature = teacher_temperature(self.config, epoch)
        teacher = [F.softmax((logits.float() - self.center) / temperature, dim=1) for logits in targets]
        student = [F.log_softmax(view.output.float() / self.config.student_temp, dim=1) for view in views]
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
        return Step(loss, feature, diagnostics, views[1].feature)

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


class Network(nn.Module):
    """Backbone and head."""

    def __init__(self, backbone: Backbone, config: DinoSettings) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = DinoHead(backbone.dim, config)


class DinoHead(nn.Module):
    """in -> hidden -> hidden -> bottleneck with GELU between, L2-normalised, then the prototypes; no BN."""

    def __init__(self, in_dim: int, config: DinoSettings) -> None:
        super().__init__()
        widths = (in_dim, config.hidden_dim, config.hidden_dim, config.bottleneck_dim)
        linear = [nn.Linear(*sizes) for sizes in itertools.pairwise(widths)]
        for layer in linear:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            nn.init.zeros_(layer.bias)
        self.mlp = nn.Sequential(linear[0], nn.GELU(), linear[1], nn.GELU(), linear[2])
        self.last_layer = Prototypes(config.bottleneck_dim, config.out_dim, config.norm_last_layer)

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, out_dim) of features (B, in_dim)."""
        x = self.mlp(x).float()  # the norm and its epsilon need float32 under autocast
        return self.last_layer(F.normalize(x, dim=1))


class Prototypes(nn.Module):
    """A bias-free linear layer with weight norm: row k of the weight is g_k * v_k / |v_k|.

    The names weight_v and weight_g are those of torch's weight norm, so that DINO's checkpoints fit.
    """

    def __init__(self, in_dim: int, out_dim: int, frozen_gain: bool) -> None:
        super().__init__()
        self.weight_v = nn.Linear(in_dim, out_dim, bias=False).weight  # torch's own init
        self.weight_g = nn.Parameter(torch.ones(out_dim, 1), requires_grad=not frozen_gain)

    def forward(self, x: Tensor) -> Tensor:
        v, g = self.weight_v, self.weight_g
        if v.is_meta:  # where torch 2.6 has no gradient of the operation below
            return F.linear(x, v * (g / v.norm(dim=1, keepdim=True)))
        # As torch's own weight norm does it: in two passes over the weights, where plain operations take ten.
        return F.linear(x, torch._weight_norm(v, g, 0))  # (B, out_dim)
