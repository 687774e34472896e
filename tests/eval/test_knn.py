import math

import pytest
import torch

from adasim.config import ModelConfig
from adasim.data import ArrayImages, synthetic
from adasim.eval import knn, knn_accuracy, online_knn
from adasim.models import Backbone, EvalTransform, build_backbone
from adasim.util.errors import UserError

SMALL = EvalTransform.of_size(16, (0.5,), (0.25,))


def dino_vote(train, train_labels, test, test_labels, k, temperature):
    """Top-1 and top-5 in percent, from the definition: votes of exp(cosine / T) in fp64, stable ranking."""
    train, test = (torch.nn.functional.normalize(x.double(), dim=1) for x in (train, test))
    classes = sorted(set(train_labels.tolist()))
    top1 = top5 = 0
    for query, label in zip(test, test_labels.tolist(), strict=True):
        similarity = train @ query
        nearest = similarity.argsort(descending=True, stable=True)[:k]
        score = {c: 0.0 for c in classes}
        for i in nearest.tolist():
            score[int(train_labels[i])] += math.exp(float(similarity[i]) / temperature)
        ranking = sorted(classes, key=lambda c: -score[c])
        top1 += label == ranking[0]
        top5 += label in ranking[: min(5, k)]
    return 100 * top1 / len(test), 100 * top5 / len(test)


def clusters(n, classes, dim=12, seed=0, noise=1.5):
    g = torch.Generator().manual_seed(seed)
    centres = torch.randn(len(classes), dim, generator=torch.Generator().manual_seed(99))
    which = torch.randint(len(classes), (n,), generator=g)
    which[: len(classes)] = torch.arange(len(classes))  # every class occurs
    return centres[which] + noise * torch.randn(n, dim, generator=g), torch.tensor(classes)[which]


@pytest.mark.parametrize("classes", [[0, 1], [5, 2, 900000], list(range(7)), list(range(40))])
def test_accuracy_equals_the_definition_for_any_number_of_classes(classes):
    train, train_labels = clusters(150, classes, seed=1)
    test, test_labels = clusters(53, classes, seed=2)
    data = train, train_labels, test, test_labels
    for temperature in (0.07, 0.5):
        results = knn_accuracy(*data, k=(20, 1, 3, 10, 150), temperature=temperature)
        assert list(results) == [1, 3, 10, 20, 150]
        for k, result in results.items():
            assert result == pytest.approx(dino_vote(*data, k, temperature))
            assert result == knn_accuracy(*data, k=k, temperature=temperature)


@pytest.mark.parametrize(("queries", "row_values", "scores"), [(1, 12 * 30, 1), (7, 12 * 40, 30), (64, 1, 5)])
def test_accuracy_does_not_depend_on_the_chunks_of_either_axis(monkeypatch, queries, row_values, scores):
    train, train_labels = clusters(150, list(range(6)), seed=1)
    test, test_labels = clusters(20, list(range(6)), seed=2)
    train[75:] = train[:75]  # every neighbour has a twin in another chunk: ties must go to the smaller id
    train_labels[75:] = train_labels[:75].roll(1)
    whole = knn_accuracy(train, train_labels, test, test_labels, k=(5, 25))
    monkeypatch.setattr(knn, "_QUERIES", queries)
    monkeypatch.setattr(knn, "_ROW_VALUES", row_values)
    monkeypatch.setattr(knn, "_SCORE_VALUES", scores)
    assert knn_accuracy(train, train_labels, test, test_labels, k=(5, 25)) == whole


def test_lengths_of_features_do_not_matter_and_half_precision_and_arrays_are_taken():
    train, train_labels = clusters(90, [0, 1, 2])
    test, test_labels = clusters(30, [0, 1, 2], seed=5)
    expected = knn_accuracy(train, train_labels, test, test_labels)
    lengths = torch.logspace(-3, 3, 90)[:, None]
    assert knn_accuracy(train * lengths, train_labels, test * 7, test_labels) == expected
    train, test = train.half(), test.half()
    rounded = knn_accuracy(train.float(), train_labels, test.float(), test_labels)
    assert knn_accuracy(train, train_labels, test, test_labels) == rounded
    assert knn_accuracy(train.numpy(), train_labels.tolist(), test.numpy(), test_labels.numpy()) == rounded


def test_a_tie_between_classes_goes_to_the_smaller_label():
    train = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    for labels in ([4, 9], [9, 4]):
        assert knn_accuracy(train, labels, train[:1], [4], k=2).top1 == 100
        assert knn_accuracy(train, labels, train[:1], [9], k=2).top1 == 0


def test_a_low_temperature_does_not_overflow():
    train, train_labels = clusters(90, [0, 1, 2])
    test, test_labels = clusters(30, [0, 1, 2], seed=5)
    nearest = knn_accuracy(train, train_labels, test, test_labels, k=1).top1
    assert knn_accuracy(train, train_labels, test, test_labels, k=30, temperature=1e-5).top1 == nearest


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"k": (1, 4)}, "k=4 is more than the 3 training images"),
        ({"k": ()}, "k=0 must be above 0"),
        ({"k": 1, "temperature": 0.0}, "temperature=0.0 must be above 0"),
    ],
)
def test_impossible_votes_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        knn_accuracy(torch.eye(3), [0, 1, 2], torch.eye(3), [0, 1, 2], **options)


# While pretraining runs


class Labels(torch.nn.Module):
    """An encoder that sees nothing but the first pixel."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[:, 0, 0, 0], torch.ones(len(x))], dim=1)


def test_online_accuracy_is_100_for_features_that_tell_the_class_and_chance_for_labels_at_random() -> None:
    labels = torch.arange(400) % 4
    pixels = (labels * 80).byte().view(-1, 1, 1, 1).expand(-1, 1, 16, 16).clone()
    sighted = Backbone(Labels(), {"dim": 2})
    assert online_knn(sighted, ArrayImages("told", pixels, labels), SMALL) == 100
    shuffled = labels[torch.randperm(400, generator=torch.Generator().manual_seed(0))]
    assert online_knn(sighted, ArrayImages("hidden", pixels, shuffled), SMALL) < 45
    partly = torch.where(torch.arange(400) < 200, labels, -1)
    assert online_knn(sighted, ArrayImages("partly", pixels, partly), SMALL) == 100
    for none in (torch.full((400,), -1), torch.arange(400)):  # unlabelled, or no class twice
        assert math.isnan(online_knn(sighted, ArrayImages("none", pixels, none), SMALL))


def test_online_accuracy_looks_at_no_more_images_than_it_may() -> None:
    resnet = build_backbone(ModelConfig(name="resnet_tiny"), 16, student=False)
    images = synthetic(300, 16)
    seen = []
    resnet.register_forward_hook(lambda module, args, output: seen.append(len(output)))
    online_knn(resnet, images, SMALL, max_images=100)
    assert sum(seen) == 100
