"""The self-distillation methods: student, teacher, loss, and what to cache. One file each, found by name."""

from adasim.config import Config
from adasim.methods.base import EncodedView, Method, Step
from adasim.methods.dino import Dino, DinoSettings
from adasim.methods.nnclr import Nnclr, NnclrSettings
from adasim.methods.simsiam import SimSiam, SimSiamSettings
from adasim.registry import METHODS
from adasim.util.seeding import key, seeded

__all__ = [
    "Dino",
    "DinoSettings",
    "EncodedView",
    "Method",
    "Nnclr",
    "NnclrSettings",
    "SimSiam",
    "SimSiamSettings",
    "Step",
    "build_method",
]


def build_method(config: Config, image_size: int, channels: int = 3) -> Method:
    """The method `config` names, on the CPU; its first weights are a pure function of `config.seed`."""
    kind: type[Method] = METHODS[config.method]
    kind.check(config)
    with seeded(key(config.seed, "weights")):
        return kind(config.model, config.settings, image_size, channels)
