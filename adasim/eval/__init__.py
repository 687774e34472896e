"""Evaluations of frozen features: k-NN, linear, few-shot and linear segmentation, as published.

Three rooms. `protocols` are functions of tensors. Extraction, splits and results stand in this folder: an `Extractor`
turns the images of a data set into an encoder's features. `evaluations` joins the two under the names of the
command line; importing this package registers them.
"""

from adasim.eval.evaluations import Evaluation
from adasim.eval.extractor import Extractor
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
from adasim.eval.report import Report
from adasim.eval.results import Result
from adasim.models.transforms import EvalTransform
from adasim.options import Sources

__all__ = [
    "EvalTransform",
    "Evaluation",
    "Extractor",
    "FeatureCache",
    "FewShotAccuracy",
    "KnnAccuracy",
    "LinearResult",
    "LinearSegmenter",
    "MeanIou",
    "Report",
    "Result",
    "SegmentationResult",
    "Sources",
    "extract",
    "fewshot_accuracy",
    "knn_accuracy",
    "linear_probe",
    "linear_probe_stream",
    "linear_segmentation",
    "miou",
    "online_knn",
]
