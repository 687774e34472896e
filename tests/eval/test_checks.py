from functools import partial

import pytest
import torch

from adasim.eval import fewshot_accuracy, knn_accuracy, linear_probe
from adasim.eval.segmentation import check_masks
from adasim.eval.tensors import check_features, check_split
from adasim.util.errors import UserError

TRAIN, TEST = torch.randn(8, 3), torch.randn(4, 3)
TRAIN_LABELS, TEST_LABELS = torch.arange(8) % 4, torch.arange(4)


def spoilt(features, value, row=2):
    features = features.clone()
    features[row, 1] = value
    return features


BAD_SPLITS = [
    ({"train": spoilt(TRAIN, torch.nan)}, "train_features has a NaN or infinite value in row 2"),
    ({"test": spoilt(TEST, torch.inf)}, "test_features has a NaN or infinite value in row 2"),
    (
        {"test": spoilt(spoilt(TEST, torch.inf), -torch.inf, 1)},
        "test_features has a NaN or infinite value in row 1",
    ),
    (
        {"train_labels": torch.tensor([0, 1, 2, 3, -1, -1, 2, 3])},
        "2 of 8 images have no label .the first is row 4",
    ),
    ({"test_labels": torch.tensor([0, 1, -1, 3])}, "1 of 4 images have no label"),
    ({"test_labels": torch.tensor([0, 7, 9, 3])}, "test_labels hold ids 7, 9 that train_labels never show"),
    ({"train_labels": torch.arange(7)}, r"train_labels has shape \(7,\) for 8 images"),
    ({"train_labels": torch.zeros(8)}, "train_labels holds torch.float32; give whole numbers"),
    ({"train_labels": torch.eye(8, dtype=torch.int64)}, "give one label per image"),
    ({"test": torch.randn(4, 5)}, "train_features are 3 wide and test_features 5"),
    ({"test": torch.randn(4, 3, 1)}, r"test_features has shape \(4, 3, 1\)"),
    ({"train": torch.randn(0, 3)}, r"train_features has shape \(0, 3\)"),
    ({"train": torch.ones(8, 3, dtype=torch.int64)}, "train_features holds torch.int64"),
]


@pytest.mark.parametrize(("change", "sentence"), BAD_SPLITS)
def test_bad_splits_are_refused_by_every_evaluation_in_the_same_words(change, sentence):
    split = {"train": TRAIN, "train_labels": TRAIN_LABELS, "test": TEST, "test_labels": TEST_LABELS} | change
    knn, linear = partial(knn_accuracy, k=1), partial(linear_probe, epochs=1)
    for evaluate in (check_split, knn, linear):
        with pytest.raises(UserError, match=sentence):
            evaluate(*split.values())


def test_fewshot_refuses_nan_and_missing_labels():
    with pytest.raises(UserError, match="features has a NaN or infinite value in row 2"):
        fewshot_accuracy(spoilt(TRAIN, torch.nan), TRAIN_LABELS)
    with pytest.raises(UserError, match="labels: 8 of 8 images have no label"):
        fewshot_accuracy(TRAIN, TRAIN_LABELS * 0 - 1)


def test_large_but_finite_features_are_not_taken_for_infinite():
    for dtype in (torch.float16, torch.float32, torch.bfloat16):
        check_features(torch.full((2, 64), torch.finfo(dtype).max, dtype=dtype), "features")


def test_labels_become_places_in_the_order_of_their_values():
    split = check_split(torch.eye(3), [30, 10, 20], torch.eye(3), [10, 10, 30])
    assert split.train_labels.tolist() == [2, 0, 1]
    assert split.test_labels.tolist() == [0, 0, 2]
    assert split.classes.tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("masks", "size", "sentence"),
    [
        (
            torch.tensor([[[0, 7], [9, 255]]]),
            None,
            "hold ids 7, 9; this data set has classes 0 to 2, and 255",
        ),
        (torch.tensor([[[0, -1]]]), None, "hold id -1; this data set"),
        (torch.zeros(1, 4, 6, dtype=torch.uint8), (4, 5), r"A mask is 4 x 6 and its image 4 x 5"),
        (torch.zeros(1, 2, 2), None, "hold torch.float32"),
    ],
)
def test_masks_with_unknown_ids_or_another_size_are_refused(masks, size, sentence):
    with pytest.raises(UserError, match=sentence):
        check_masks(masks, num_classes=3, ignore=255, size=size)


def test_byte_masks_with_ignored_pixels_pass():
    masks = torch.tensor([[[0, 2], [1, 255]]], dtype=torch.uint8)
    assert check_masks(masks, num_classes=3, ignore=255, size=(2, 2)) is masks
