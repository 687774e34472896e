"""Evaluations of frozen features: k-NN, linear, few-shot and linear segmentation, as published; and without labels.

One file for each evaluation: the published protocol as a function of tensors, then what `adasim eval NAME` does with
it and reports. Importing this package registers them. `evaluation.py` has what they share: an `Extractor` turns the
images of a data set into an encoder's features, and a `Report` has the figures.
"""

from adasim.eval.evaluation import Evaluation, Extractor, Report
from adasim.eval.features import extract
from adasim.eval.fewshot import fewshot_accuracy
from adasim.eval.knn import knn_accuracy, online_knn
from adasim.eval.linear import linear_probe
from adasim.eval.segmentation import linear_segmentation, miou
from adasim.eval.views import view_retrieval
from adasim.options import Sources

__all__ = [
    "Evaluation",
    "Extractor",
    "Report",
    "Sources",
    "extract",
    "fewshot_accuracy",
    "knn_accuracy",
    "linear_probe",
    "linear_segmentation",
    "miou",
    "online_knn",
    "view_retrieval",
]
