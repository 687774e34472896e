"""The self-distillation methods: student, teacher, loss, and what to cache."""

from adasim.config import Config
from adasim.errors import UserError
from adasim.methods.base import Method, Seen, Step
from adasim.methods.dino import Dino
from adasim.methods.simsiam import SimSiam
from adasim.seeding import key, seeded

__all__ = ["Dino", "Method", "Seen", "SimSiam", "Step", "build_method"]


def build_method(config: Config, image_size: int, channels: int = 3) -> Method:
    """The method `config` names, on the CPU; its first weights are a pure function of `config.seed`."""
    if config.method == "simsiam" and config.views.local_crops:
        raise UserError(
            f"views.local_crops={config.views.local_crops} needs method=dino: SimSiam compares two views. "
            f"Set --views.local-crops 0."
        )
    with seeded(key(config.seed, "weights")):
        if config.method == "dino":
            return Dino(config.model, config.dino, image_size, channels)
        return SimSiam(config.model, config.simsiam, image_size, channels)
