"""Recipes: functions that return a whole configuration. The paper's four, desk-scale ones, and the demo.

A recipe is a starting point; every field may be changed on the command line or in Python. The paper's need images
(`--data`); the others use generated ones where none are named. Values come from the AdaSim paper's appendix and,
where it defers to them, from DINO's and SimSiam's published settings. Defaults are DINO's;
tests/test_recipes.py has every published value.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from adasim.config import (
    Config,
    DataConfig,
    ModelConfig,
    NeighborsConfig,
    OptimConfig,
    SaveConfig,
    ViewsConfig,
)
from adasim.options import DINO_VIEWS, SIAMESE_VIEWS, DinoSettings, SimSiamSettings
from adasim.util.errors import UserError, suggest

if TYPE_CHECKING:  # imports torch, and a list of recipes must not wait for it
    from adasim.models import Weights


def simsiam_resnet50() -> Config:
    """SimSiam, ResNet-50, 100 epochs of ImageNet at batch 512 (paper: k-NN 57.9, linear 68.1)."""
    return Config(
        method="simsiam",
        epochs=100,
        batch_size=512,
        views=ViewsConfig(**SIAMESE_VIEWS, scale=(0.2, 1.0)),
        model=ModelConfig(name="resnet50", zero_init_residual=True, drop_path=0.0),
        settings=SimSiamSettings(proj_dim=2048, pred_dim=512, fix_pred_lr=True),
        neighbors=NeighborsConfig(tau=0.2, window=1, k=10),
        optim=sgd(lr=0.05, weight_decay=1e-4, min_lr=0.0, warmup_epochs=0, lr_every="epoch", decay_all=True),
    )


def dino_resnet50() -> Config:
    """DINO (two crops), ResNet-50, 100 epochs of ImageNet at batch 1024 (paper: k-NN 50.7, linear 60.1)."""
    return Config(
        epochs=100,
        batch_size=1024,
        # The paper says "as on GitHub", but its list has fp32, no clipping, a free last layer and 0.07, where
        # DINO's own ResNet command has fp16, 3.0, a normalised one and 0.04. The paper's list is followed.
        precision="fp32",
        # The appendix lists 0.14; the limitations section says that 0.25 was kept. The appendix is followed.
        views=ViewsConfig(**DINO_VIEWS, scale=(0.14, 1.0)),
        model=ModelConfig(name="resnet50"),  # stochastic depth is in the paper's list, but ResNets have none
        neighbors=NeighborsConfig(tau=0.2, window=1, k=10),
        optim=sgd(lr=0.03, weight_decay=1e-4),  # lr 0.12 at batch 1024
    )


def dino_vit_s16() -> Config:
    """DINO (two crops), ViT-S/16, 800 epochs of ImageNet at batch 1024 (paper: k-NN 70.1, linear 73.3)."""
    return Config(
        epochs=800,
        batch_size=1024,
        precision="fp16",
        # The appendix lists 0.4; the limitations section says that 0.25 was kept. The appendix, which agrees
        # with the released code's default, is followed.
        views=ViewsConfig(**DINO_VIEWS, scale=(0.4, 1.0)),
        model=ModelConfig(name="vit_small", patch_size=16, drop_path=0.1),
        # The prose beside the main table says (0.2, 50, 10); by the ablation 70.1/73.3 belongs to these.
        neighbors=NeighborsConfig(tau=0.2, window=10, k=3),
        optim=OptimConfig(lr=5e-4, min_lr=1e-5),  # lr 0.002 at batch 1024
    )


def dino_vit_b16() -> Config:
    """DINO (two crops), ViT-B/16, 800 epochs of ImageNet at batch 1024 (paper: k-NN 72.7, linear 75.0).

    The paper reports this model without its settings. tau, w and K are those of ViT-S/16; the rest is DINO's own
    for ViT-B/16 (400 epochs there, and ten local crops, left out here). Value by value: docs/method.md.
    """
    return Config(
        epochs=800,
        batch_size=1024,
        views=ViewsConfig(**DINO_VIEWS, scale=(0.25, 1.0)),
        model=ModelConfig(name="vit_base", patch_size=16, drop_path=0.1),
        settings=DinoSettings(
            norm_last_layer=True, freeze_last_layer_epochs=3, teacher_temp_warmup_epochs=50
        ),
        neighbors=NeighborsConfig(tau=0.2, window=10, k=3),
        optim=OptimConfig(lr=7.5e-4, min_lr=2e-6, clip_grad=0.3),  # lr 0.003 at batch 1024
    )


def desk_vit() -> Config:
    """DINO, a small ViT with 4-pixel patches, for 32-pixel images on two CPU cores."""
    return Config(
        epochs=100,
        batch_size=128,
        data=DataConfig(source="synthetic"),
        views=ViewsConfig(**DINO_VIEWS, **_DESK_VIEWS),
        model=ModelConfig(name="vit_mini", patch_size=4, drop_path=0.0),
        settings=DinoSettings(
            out_dim=512,
            hidden_dim=512,
            bottleneck_dim=128,
            norm_last_layer=True,
            teacher_temp=0.04,  # a few thousand steps are too few to warm up to 0.07
            teacher_temp_warmup_epochs=0,
            teacher_momentum=0.99,  # 0.996 averages over more steps than such a run has epochs for
        ),
        neighbors=NeighborsConfig(tau=0.2, window=10, k=5),
        optim=OptimConfig(lr=2e-3, warmup_epochs=5, clip_grad=3.0),
        save=SaveConfig(log_every=10),
    )


def desk_resnet() -> Config:
    """SimSiam, a ResNet of four blocks, for 32-pixel images on two CPU cores."""
    return Config(
        method="simsiam",
        epochs=150,
        batch_size=128,
        data=DataConfig(source="synthetic"),
        views=ViewsConfig(**SIAMESE_VIEWS, **_DESK_VIEWS),
        model=ModelConfig(name="resnet_tiny", drop_path=0.0),
        settings=SimSiamSettings(proj_dim=512, pred_dim=128, fix_pred_lr=True),
        neighbors=NeighborsConfig(tau=0.2, window=10, k=5),
        # lr: 0.2 at batch 128; with a quarter of it the encoder learns far less in as many epochs. Weight decay:
        # SimSiam's own choice for 32-pixel images.
        optim=sgd(lr=0.4, weight_decay=5e-4, min_lr=0.0, warmup_epochs=0, lr_every="epoch", decay_all=True),
        save=SaveConfig(log_every=10),
    )


def demo() -> Config:
    """desk-resnet for three minutes on 3,000 generated images: no data needed."""
    config = desk_resnet()
    config.epochs = 60
    config.batch_size = 64  # twice the steps of 128: with those, 60 epochs are enough for some seeds only
    config.optim.warmup_epochs = 5
    config.neighbors.window = 20  # such images seldom match themselves best; over 20 epochs, one in five does
    config.data = DataConfig(source="synthetic:3000")
    return config


# 32 pixels: mild crops, no blur (it would leave little); one mean serves grey and colour images alike.
_DESK_VIEWS: dict[str, Any] = {"size": 32, "scale": (0.4, 1.0), "blur": 0.0, "mean": (0.5,), "std": (0.25,)}


def sgd(*, lr: float, weight_decay: float, **more: Any) -> OptimConfig:
    """SGD, whose weight decay stays as it is."""
    return OptimConfig(name="sgd", lr=lr, weight_decay=weight_decay, weight_decay_end=weight_decay, **more)


RECIPES: dict[str, Callable[[], Config]] = {
    make.__name__.replace("_", "-"): make
    for make in (simsiam_resnet50, dino_resnet50, dino_vit_s16, dino_vit_b16, desk_vit, desk_resnet, demo)
}
"""Every recipe by the name the command line uses; the first line of its docstring is its help."""


def get_recipe(name: str) -> Config:
    """A fresh configuration of the recipe `name`."""
    if name not in RECIPES:
        if os.sep in name or os.path.exists(name):
            raise UserError(
                f"{name} is a path, not a recipe. To pretrain on images of your own: adasim pretrain photos --data "
                f"{shlex.quote(name)}"
            )
        names = ["photos", *RECIPES]  # the first is the command line's, which looks at the images
        raise UserError(f"Unknown recipe {name!r}. {suggest(name, names)}")
    return replace(RECIPES[name](), recipe=name)


def for_epochs(config: Config, epochs: int) -> Config:
    """The configuration for another number of epochs. Where these are few, so that it can learn at all, warm-up and
    window take no more than a quarter of them, the teacher temperature's warm-up no more than half; at least one.
    """
    quarter, half = max(1, epochs // 4), max(1, epochs // 2)
    head_epochs = config.optim.head_epochs
    if head_epochs:  # the same share of the run, and at least one, if that leaves the encoder any
        head_epochs = min(max(1, head_epochs * epochs // config.epochs), quarter, epochs - 1)
    warmup_epochs = min(config.optim.warmup_epochs, quarter)
    optim = replace(config.optim, warmup_epochs=warmup_epochs, head_epochs=head_epochs)
    neighbors = replace(config.neighbors, window=min(config.neighbors.window, quarter))
    settings = config.settings
    if getattr(settings, "teacher_temp_warmup_epochs", 0) > half:
        settings = replace(settings, teacher_temp_warmup_epochs=half)
    return replace(config, epochs=epochs, settings=settings, optim=optim, neighbors=neighbors)


def from_weights(config: Config, init: str, weights: Weights, encoder_lr: float = 0.05) -> Config:
    """The configuration for an encoder that starts from trained weights, so that training does not spoil it.

    Architecture, image size and normalisation are the weights' own where they say so. Batch norms keep their
    statistics, new heads learn alone in the first tenth of the epochs, and the encoder learns at a share of their
    rate: a twentieth, since recipes have rates for fresh weights.
    """
    model, views = replace(config.model, init=init, freeze_norm=True), config.views
    if known := weights.model:
        model = replace(model, name=known.name, patch_size=known.patch_size, small_stem=known.small_stem)
    if seen := weights.transform:
        views = replace(views, size=seen.size, mean=seen.mean, std=seen.std)
    optim = replace(config.optim, encoder_lr=encoder_lr, head_epochs=max(1, config.epochs // 10))
    return replace(config, model=model, views=views, optim=optim)
