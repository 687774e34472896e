"""Encoders and the heads that train them."""

from adasim.models.backbones import Backbone, build_backbone
from adasim.models.files import BACKBONE_FILE, load_backbone, save_backbone
from adasim.models.heads import DinoHead, Predictor, Projector
from adasim.models.pixels import PIXELS, pixels
from adasim.models.start import build_from, start_from
from adasim.models.transforms import EvalTransform
from adasim.models.weights import Weights, parse_source, read_weights

__all__ = [
    "BACKBONE_FILE",
    "PIXELS",
    "Backbone",
    "DinoHead",
    "EvalTransform",
    "Predictor",
    "Projector",
    "Weights",
    "build_backbone",
    "build_from",
    "load_backbone",
    "parse_source",
    "pixels",
    "read_weights",
    "save_backbone",
    "start_from",
]
