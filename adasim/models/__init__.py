"""Encoders: built, read from files of ours and of others, and written. The heads belong to the methods."""

from adasim.models.backbone import PIXELS, Backbone, build_backbone, pixels
from adasim.models.io import BACKBONE_FILE, load_backbone, save_backbone
from adasim.models.transform import EvalTransform
from adasim.models.weights import Weights, build_from, parse_source, read_weights, start_from

__all__ = [
    "BACKBONE_FILE",
    "PIXELS",
    "Backbone",
    "EvalTransform",
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
