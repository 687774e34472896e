import importlib

import torch
import torch.nn.functional as F
from torch import Tensor

from adasim.data import synthetic


def nearest_classes(train: Tensor, labels: Tensor, test: Tensor, k: int = 20) -> Tensor:
    """The class with most weight exp(cos / 0.07) among the k nearest: the paper's k-NN (5.1)."""
    similarity = F.normalize(test.flatten(1).float()) @ F.normalize(train.flatten(1).float()).T
    value, index = similarity.topk(k)
    votes = torch.zeros(len(test), 16).scatter_add_(1, labels[index], (value / 0.07).exp())
    return votes.argmax(1)


def test_a_longer_data_set_begins_with_the_shorter_one() -> None:
    short, long = synthetic(100), synthetic(1500)
    assert torch.equal(short.images, long.images[:100])
    assert torch.equal(short.labels, long.labels[:100])
    assert torch.equal(short.masks, long.masks[:100])
    assert torch.equal(long.labels[:160].bincount(), torch.full((16,), 10))  # balanced in whole rounds


def test_the_splits_and_the_seeds_share_no_image() -> None:
    sets = [synthetic(200), synthetic(200, split="test"), synthetic(200, seed=1)]
    images = torch.cat([s.images.flatten(1) for s in sets])
    assert len(images.unique(dim=0)) == 600


def test_the_mask_names_the_class_on_the_pebble_and_nothing_else() -> None:
    data = synthetic(64, size=48)
    share = (data.masks > 0).float().mean((1, 2))
    assert share.min() > 0.2
    assert share.max() < 1
    for mask, label in zip(data.masks, data.labels, strict=True):
        assert set(mask.unique().tolist()) == {0, int(label) + 1}
    one = data.mask(3)
    assert one is not None
    assert one.shape == (48, 48)


def test_the_same_picture_comes_out_at_another_size() -> None:
    small = synthetic(64, size=32).images.float()
    large = F.avg_pool2d(synthetic(64, size=64).images.float(), 2)
    correlation = F.cosine_similarity((small - small.mean()).flatten(1), (large - large.mean()).flatten(1))
    assert correlation.median() > 0.9


def test_raw_pixels_are_poor_neighbours() -> None:
    train, test = synthetic(3000), synthetic(500, split="test")
    plain = nearest_classes(train.images, train.labels, test.images)
    mean = train.images.float().mean(0)
    centred = nearest_classes(train.images - mean, train.labels, test.images - mean)
    assert (plain == test.labels).float().mean() < 0.2
    assert (centred == test.labels).float().mean() < 0.37


def test_what_is_planted_for_benchmarks_is_where_the_list_says() -> None:
    clean = synthetic(300)
    hidden = importlib.import_module("benchmarks._planted").planted(300, exact=5, near=4, wrong=6)
    data = hidden.images
    assert (len(hidden.duplicates), len(hidden.near_duplicates), len(hidden.wrong_labels)) == (5, 4, 6)
    pairs = hidden.duplicates + hidden.near_duplicates
    touched = [i for pair in pairs for i in pair] + [i for i, _ in hidden.wrong_labels]
    assert len(set(touched)) == len(touched) == 24
    for copy, original in hidden.duplicates:
        assert torch.equal(data.images[copy], data.images[original])
        assert data.labels[copy] == data.labels[original]
    for copy, original in hidden.near_duplicates:
        a, b = data.images[copy].float(), data.images[original].float()
        assert not torch.equal(a, b)
        assert (a - b).abs().mean() < (a - data.images.float()).abs().mean((1, 2, 3)).quantile(0.02)
    for i, truth in hidden.wrong_labels:
        assert clean.labels[i] == truth != data.labels[i]
    others = sorted(set(range(300)) - {copy for copy, _ in pairs})
    assert torch.equal(clean.images[others], data.images[others])
