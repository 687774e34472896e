from functools import partial

import pytest
import torch

from adasim.eval import fewshot_accuracy, knn_accuracy, linear_probe
from adasim.eval.features import check_features, check_split
from adasim.util.errors import UserError

TRAIN, TEST = torch.randn(8, 3), torch.randn(4, 3)
TRAIN_LABELS, TEST_LABELS = torch.arange(8) % 4, torch.arange(4)


def spoilt(features, value, row=2):
    features = features.clone()
    features[row, 1] = value
    return features


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"train": spoilt(TRAIN, torch.nan)}, "train_features has a NaN or infinite value in row 2"),
        ({"test": spoilt(spoilt(TEST, torch.inf), -torch.inf, 1)}, "test_features has a NaN .* in row 1"),
        ({"train_labels": torch.tensor([0, 1, 2, 3, -1, -1, 2, 3])}, "2 of 8 images have no label .*row 4"),
        ({"test_labels": torch.tensor([0, 1, -1, 3])}, "1 of 4 images have no label"),
        ({"test_labels": torch.tensor([0, 7, 9, 3])}, "ids 7, 9 that train_labels never show"),
        ({"train_labels": torch.arange(7)}, r"shape \(7,\) for 8 images"),
        ({"train_labels": torch.zeros(8)}, "torch.float32; give whole numbers"),
        ({"train_labels": torch.eye(8, dtype=torch.int64)}, "one label per image"),
        ({"test": torch.randn(4, 5)}, "train_features are 3 wide and test_features 5"),
        ({"test": torch.randn(4, 3, 1)}, r"test_features has shape \(4, 3, 1\)"),
        ({"train": torch.randn(0, 3)}, r"train_features has shape \(0, 3\)"),
        ({"train": torch.ones(8, 3, dtype=torch.int64)}, "train_features holds torch.int64"),
    ],
)
def test_bad_splits_are_refused_by_every_evaluation_in_the_same_words(change, sentence):
    split = {"train": TRAIN, "train_labels": TRAIN_LABELS, "test": TEST, "test_labels": TEST_LABELS} | change
    for evaluate in (partial(knn_accuracy, k=1), partial(linear_probe, epochs=1)):
        with pytest.raises(UserError, match=sentence):
            evaluate(*split.values())


def test_fewshot_refuses_them_too():
    with pytest.raises(UserError, match="features has a NaN or infinite value in row 2"):
        fewshot_accuracy(spoilt(TRAIN, torch.nan), TRAIN_LABELS)


def test_large_but_finite_features_are_not_taken_for_infinite():
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        check_features(torch.full((2, 64), torch.finfo(dtype).max, dtype=dtype), "features")


def test_labels_become_places_in_the_order_of_their_values():
    split = check_split(torch.eye(3), [30, 10, 20], torch.eye(3), [10, 10, 30])
    assert split.train_labels.tolist() == [2, 0, 1]
    assert split.test_labels.tolist() == [0, 0, 2]
    assert split.classes.tolist() == [10, 20, 30]
