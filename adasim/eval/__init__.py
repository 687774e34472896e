"""Evaluations of frozen features: k-NN, linear, few-shot and linear segmentation, as published."""

from adasim.eval.features import FeatureCache, extract
from adasim.eval.online import online_knn
from adasim.eval.protocols.fewshot import FewShotAccuracy, fewshot_accuracy
from adasim.eval.protocols.knn import KnnAccuracy, knn_accuracy
from adasim.eval.protocols.linear import LinearResult, linear_probe, linear_probe_stream
from adasim.eval.protocols.segmentation import (
    LinearSegmenter,
    MeanIou,
    SegmentationResult,
    linear_segmentation,
    miou,
)
from adasim.models.transforms import EvalTransform

__all__ = [
    "EvalTransform",
    "FeatureCache",
    "FewShotAccuracy",
    "KnnAccuracy",
    "LinearResult",
    "LinearSegmenter",
    "MeanIou",
    "SegmentationResult",
    "extract",
    "fewshot_accuracy",
    "knn_accuracy",
    "linear_probe",
    "linear_probe_stream",
    "linear_segmentation",
    "miou",
    "online_knn",
]
