"""The evaluations of `adasim eval`, one file each: from an encoder and the names of data sets to a report."""

from adasim.eval.evaluations.base import Evaluation
from adasim.eval.evaluations.fewshot import Fewshot
from adasim.eval.evaluations.knn import Knn
from adasim.eval.evaluations.linear import Linear
from adasim.eval.evaluations.segmentation import Segmentation
from adasim.eval.evaluations.views import OwnViews

__all__ = ["Evaluation", "Fewshot", "Knn", "Linear", "OwnViews", "Segmentation"]
