"""Encoders and the heads that train them."""

from adasim.models.backbones import Backbone, build_backbone
from adasim.models.files import BACKBONE_FILE, load_backbone, save_backbone
from adasim.models.heads import DinoHead, Predictor, Projector
from adasim.models.start import read_weights, start_from
from adasim.models.transforms import EvalTransform

__all__ = [
    "BACKBONE_FILE",
    "Backbone",
    "DinoHead",
    "EvalTransform",
    "Predictor",
    "Projector",
    "build_backbone",
    "load_backbone",
    "read_weights",
    "save_backbone",
    "start_from",
]
