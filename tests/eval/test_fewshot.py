import math
from typing import Any

import pytest
import torch

from adasim.eval import fewshot, fewshot_accuracy
from adasim.util.errors import UserError


def clusters(sizes, dim=6, seed=0, spread=1.0):
    g = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    labels = labels[torch.randperm(len(labels), generator=g)]
    centres = torch.randn(len(sizes), dim, generator=g)
    return spread * centres[labels] + torch.randn(len(labels), dim, generator=g), labels


def draw_all(labels, ways, count, episodes, seed=0):
    """The very episodes that `fewshot_accuracy` draws."""
    counts = labels.unique(return_counts=True)[1]
    first = counts.cumsum(0) - counts
    return fewshot._draw(
        torch.arange(episodes), labels.argsort(stable=True), first, counts, ways, count, seed
    )


def loop(features, labels, ways, shots, queries, episodes):
    """The protocol as prose: one episode, one way and one query at a time, in fp64."""
    images, drawn = draw_all(labels, ways, shots + queries, episodes)
    features = features.double()
    accuracies = []
    for episode, real in zip(images.tolist(), drawn.tolist(), strict=True):
        prototypes = [features[way[:shots]].mean(0) for way in episode]
        by_way = []
        for own, (way, mask) in enumerate(zip(episode, real, strict=True)):
            asked = [image for image, there in zip(way[shots:], mask[shots:], strict=True) if there]
            nearest = [
                min(range(ways), key=lambda w: float((features[i] - prototypes[w]).square().sum()))
                for i in asked
            ]
            by_way.append(sum(guess == own for guess in nearest) / len(asked))
        accuracies.append(100 * sum(by_way) / ways)
    mean = sum(accuracies) / episodes
    variance = sum((a - mean) ** 2 for a in accuracies) / episodes
    return mean, 1.96 * math.sqrt(variance) / math.sqrt(episodes)


@pytest.mark.parametrize("offset", [0.0, 3000.0])
def test_accuracy_and_its_interval_equal_a_loop_over_episodes(offset):
    features, labels = clusters([20, 25, 31, 22, 60, 20])
    features = ((features + offset) * 64).round() / 64  # exact in fp32, also far from the origin
    expected = loop(features, labels, 3, 5, 15, 40)
    assert 50 < expected[0] < 95
    assert fewshot_accuracy(features, labels, ways=3, episodes=40) == pytest.approx(expected, abs=1e-4)


def test_per_class_gives_each_class_of_an_unbalanced_episode_the_same_weight():
    sizes = [6, 7, 9, 40, 12, 100]
    features, labels = clusters(sizes)
    expected = loop(features, labels, 4, 5, 15, 40)
    result = fewshot_accuracy(features, labels, ways=4, episodes=40, per_class=True)
    assert result == pytest.approx(expected, abs=1e-4)
    even = clusters([20] * 8)
    assert fewshot_accuracy(*even, per_class=True) == fewshot_accuracy(*even)


def test_the_first_episodes_do_not_depend_on_how_many_follow_and_a_seed_names_them():
    labels = torch.arange(200) % 8
    images, _ = draw_all(labels, 5, 20, 50)
    assert torch.equal(images[:10], draw_all(labels, 5, 20, 10)[0])
    assert not torch.equal(images, draw_all(labels, 5, 20, 50, seed=1)[0])


def test_an_episode_holds_distinct_classes_and_distinct_images_of_their_class():
    labels = torch.arange(300) % 13
    images, drawn = draw_all(labels, 5, 20, 100)
    assert drawn.all()
    assert (labels[images] == labels[images][:, :, :1]).all()
    for episode in images:
        assert len(set(labels[episode[:, 0]].tolist())) == 5
        assert len(set(episode.flatten().tolist())) == 100


def test_every_number_is_drawn_equally_often_at_every_place():
    rows, size, count = 30_000, 6, 4
    chosen, real = fewshot._choose(torch.full((rows,), size), count, torch.arange(rows), 0, "test")
    assert real.all()
    shares = torch.stack([torch.bincount(place, minlength=size) for place in chosen.T]) / rows
    deviation = math.sqrt(1 / 6 * 5 / 6 / rows)
    assert (shares - 1 / size).abs().max() < 5 * deviation
    pairs = torch.bincount(chosen[:, 0] * size + chosen[:, 1], minlength=size**2).view(size, size) / rows
    assert (pairs.diagonal() == 0).all()
    assert (pairs[~torch.eye(size, dtype=torch.bool)] - 1 / 30).abs().max() < 5 * math.sqrt(1 / 30 / rows)


def test_a_class_below_the_count_gives_a_shuffle_of_all_its_images():
    rows = 6000
    chosen, real = fewshot._choose(torch.full((rows,), 3), 5, torch.arange(rows), 0, "test")
    assert real.tolist() == [[True] * 3 + [False] * 2] * rows
    orders = chosen[:, :3] @ torch.tensor([9, 3, 1])
    assert chosen[:, :3].sort(dim=1).values.tolist() == [[0, 1, 2]] * rows
    assert (orders.unique(return_counts=True)[1] / rows - 1 / 6).abs().max() < 5 * math.sqrt(1 / 6 / rows)


def test_classes_with_too_few_images_are_refused_by_name():
    features, labels = clusters([20, 19, 30, 8, 20, 20])
    names = ["ant", "bee", "cow", "dog", "elk", "fox"]
    with pytest.raises(UserError, match=r"need 20 images .* 'bee' \(19\), 'dog' \(8\)\."):
        fewshot_accuracy(features, labels, class_names=names)
    with pytest.raises(UserError, match=r"class 1 \(19\), class 3 \(8\)\."):
        fewshot_accuracy(features, labels)
    with pytest.raises(UserError, match=r"need 9 images .* 'dog' \(8\)"):
        fewshot_accuracy(features, labels, shots=8, class_names=names, per_class=True)


def test_fewer_classes_than_ways_and_empty_episodes_are_refused():
    features, labels = clusters([20] * 4)
    with pytest.raises(UserError, match=r"ways=5 .* the data has 4"):
        fewshot_accuracy(features, labels)
    for name in ("ways", "shots", "queries", "episodes"):
        empty: dict[str, Any] = {name: 0}
        with pytest.raises(UserError, match=f"{name}=0 must be above 0"):
            fewshot_accuracy(features, labels, **empty)
