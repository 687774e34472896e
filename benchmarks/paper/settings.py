"""One frozen setting per method, and the arms. Chosen by standard pairs alone, before any other arm was looked at.

5,000 training images (the first 500 of each class of CIFAR-10 by file name) and 200 epochs are 1 M images a run: 18
to 25 minutes of one core. That is 39 steps an epoch, 7,800 in all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from adasim.config import Config, ModelConfig, NeighborsConfig, OptimConfig, ViewsConfig
from adasim.methods import NnclrSettings
from adasim.options import DINO_VIEWS, DinoSettings, NearestSettings
from adasim.recipes import get_recipe

from .controls import ControlSettings
from .tables import read_arm

IMAGES_PER_CLASS = 500
MORE_PER_CLASS = 2000
EPOCHS = 200
SHORT = 100
"""Epochs of the ablation, which has many cells, of the ViT, of the contrastive loss and of weak augmentations."""


def simsiam() -> Config:
    """desk-resnet at half its rate with a warm-up: on photographs it learns as well, and no seed is lost."""
    config = get_recipe("desk-resnet")
    config.optim.lr = 0.2  # 0.1 at batch 128
    config.optim.warmup_epochs = 10
    return _common(config)


def simsiam_short() -> Config:
    """SimSiam for half as long."""
    config = simsiam()
    config.epochs = SHORT
    return config


def simsiam_more() -> Config:
    """SimSiam with four times the images and a quarter of the epochs: as many steps, some 470 of them of warm-up."""
    config = simsiam()
    config.epochs, config.optim.warmup_epochs, config.eval.every = EPOCHS // 4, 3, 5
    return config


def dino() -> Config:
    """DINO with two crops on the same ResNet: desk-vit's head, temperatures and AdamW, a teacher that follows sooner.

    Of seven changes, tried for 25 epochs of standard pairs and judged within the training images, this one helped
    most (31.8 by k-NN instead of 29.3). Twice the rate, four times the prototypes, less weight decay and lower
    temperatures gave 26.9 to 31.5.
    """
    config = get_recipe("desk-vit")
    config.model = get_recipe("desk-resnet").model
    config.settings.teacher_momentum = 0.97
    config.optim.warmup_epochs = 10
    return _common(config)


def dino_uncentred() -> Config:
    """DINO whose centre never moves, for 20 epochs: it cannot but collapse, and the monitor must say so."""
    config = dino()
    config.settings.center_momentum = 1.0
    config.epochs, config.optim.warmup_epochs = 20, 3
    return config


def dino_prototypes() -> Config:
    """DINO with the paper's 65,536 prototypes instead of 512, for as many epochs as a desk allows."""
    config = dino()
    config.settings.out_dim = 65_536
    config.epochs, config.optim.warmup_epochs, config.eval.every = 12, 2, 3
    return config


def dino_vit() -> Config:
    """DINO with the same settings on desk-vit's ViT of four blocks, with 8-pixel patches and for half as long.

    With its own 4-pixel patches 200 epochs would take two and a half hours of one core.
    """
    config = dino()
    config.model = get_recipe("desk-vit").model
    config.model.patch_size = 8
    config.epochs = SHORT
    return config


def nnclr() -> Config:
    """NNCLR on SimSiam's encoder, views and optimiser; the queue holds two fifths of the images."""
    return replace(simsiam_short(), method="nnclr", settings=NnclrSettings(queue_size=2048, temperature=0.2))


def infonce() -> Config:
    """The same without a queue: pairs alone decide who is drawn together."""
    return replace(nnclr(), settings=NnclrSettings(queue_size=0, temperature=0.2))


def simsiam_weak() -> Config:
    """Crops and flips alone."""
    config = simsiam_short()
    config.views.color = config.views.blur = config.views.solarize = 0.0
    return config


def late() -> Config:
    """SimSiam for 40 epochs on the bench's images, from an encoder that has seen the labels of 25,000 others."""
    config = simsiam()
    config.optim.lr, config.optim.warmup_epochs, config.epochs = 0.1, 2, 40
    config.model.init = "supervised:12"
    return config


def late_low(epochs: int) -> Callable[[], Config]:
    """The same at a tenth of the rate, from an encoder that was trained with labels for so many epochs."""

    def build() -> Config:
        config = late()
        config.optim.lr = 0.01
        config.model.init = f"supervised:{epochs}"
        return config

    return build


def glyphs() -> Config:
    """SimSiam on letters in 300 fonts, 7,800 images: 65 epochs of 121 steps."""
    return _glyphs(get_recipe("desk-resnet"))


def glyphs_dino() -> Config:
    """DINO on the same."""
    return _glyphs(dino())


def _glyphs(config: Config) -> Config:
    config = _common(config)
    config.batch_size, config.epochs, config.optim.warmup_epochs = 64, 65, 3
    return config


def continued(epochs: int) -> Callable[[], Config]:
    """DINO from EfficientNet-Lite0 at 96 pixels as `adasim pretrain photos` goes on: batch norms frozen, head first.

    Some 390 steps on either set of images.
    """

    def build() -> Config:
        settings = DinoSettings(
            out_dim=4096,
            hidden_dim=1024,
            norm_last_layer=True,
            teacher_momentum=0.99,
            teacher_temp=0.04,
            teacher_temp_warmup_epochs=0,
        )
        optim = OptimConfig(name="adamw", lr=2e-3, min_lr=1e-6, warmup_epochs=1, clip_grad=3.0)
        optim.weight_decay = optim.weight_decay_end = 0.04
        optim.encoder_lr, optim.head_epochs = 0.5, 1
        config = Config(
            method="dino",
            batch_size=64,
            precision="fp32",
            views=ViewsConfig(**DINO_VIEWS, size=96, scale=(0.3, 1.0), mean=(0.5,), std=(0.5,)),
            model=ModelConfig(name="tf_efficientnet_lite0", init="weights", freeze_norm=True, drop_path=0.0),
            settings=settings,
            neighbors=NeighborsConfig(tau=0.2, window=2, k=5),
            optim=optim,
        )
        config = _common(config)
        config.neighbors.window, config.epochs, config.eval.every = 2, epochs, 4
        return config

    return build


METHODS: dict[str, Callable[[], Config]] = {
    "simsiam": simsiam,
    "dino": dino,
    "dino-vit": dino_vit,
    "dino-65536": dino_prototypes,
    "dino-uncentred": dino_uncentred,
    "nnclr": nnclr,
    "infonce": infonce,
    "simsiam-weak": simsiam_weak,
    "simsiam-short": simsiam_short,
    "simsiam-more": simsiam_more,
    "late": late,
    "late-low-3": late_low(3),
    "late-low-12": late_low(12),
    "late-low-40": late_low(40),
    "glyphs-0": glyphs,
    "glyphs-1": glyphs,
    "glyphs-dino-0": glyphs_dino,
    "glyphs-dino-1": glyphs_dino,
    "cifar-96": continued(5),
    "clothes": continued(8),
}


def images_per_class(method: str) -> int:
    """How many training images of each class its runs see."""
    return MORE_PER_CLASS if method == "simsiam-more" else IMAGES_PER_CLASS


def build(method: str, arm: str, seed: int) -> Config:
    """The configuration of a cell. An arm is a pair policy and what is changed of its settings: `adasim:k=3,tau=0.1`.

    >>> build("simsiam", "oracle:p=0", 1).neighbors.oracle_p
    0.0
    >>> build("dino", "nearest:space=latent,k=3", 0).neighbors.k
    3
    """
    config = METHODS[method]()
    config.seed = seed
    pairs, changes = read_arm(arm)
    own: Any = None
    if pairs == "control":
        partner = changes.pop("partner", "right")
        parts = {name: float(value) for name, value in changes.items()}
        return replace(config, pairs=pairs, pair_settings=ControlSettings(partner, **parts))  # type: ignore[arg-type]
    if pairs == "nearest":
        own = NearestSettings(space=changes.pop("space", "image"))  # type: ignore[arg-type]
    values = {name: float(value) for name, value in changes.items()}
    if strange := sorted(values.keys() - ({"p"} if pairs == "oracle" else {"window", "k", "tau"})):
        raise SystemExit(f"{method}/{arm}/{seed}: pairs {pairs} have no {strange[0]} that an arm may change.")
    if pairs == "oracle":
        config.neighbors.oracle_p = values.get("p", 0.5)
    else:
        for name, value in values.items():
            setattr(config.neighbors, name, type(getattr(config.neighbors, name))(value))
    return replace(config, pairs=pairs, pair_settings=own)


def _common(config: Config) -> Config:
    config.epochs = EPOCHS
    config.neighbors.window, config.neighbors.k, config.neighbors.tau = 5, 5, 0.2
    config.neighbors.watch = True  # every arm logs its neighbours; this changes nothing that is learnt
    config.eval.every = 10
    config.save.every_minutes, config.save.keep, config.save.log_every = 5.0, 1, 1000
    config.device = "cpu"
    return config
