"""Encoders and the heads that train them."""

from adasim.models.backbone import PIXELS, Backbone, build_backbone, pixels
from adasim.models.heads import DinoHead, Predictor, Projector
from adasim.models.io import BACKBONE_FILE, load_backbone, save_backbone
from adasim.models.transform import EvalTransform
from adasim.models.weights import Weights, build_from, parse_source, read_weights, start_from

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
