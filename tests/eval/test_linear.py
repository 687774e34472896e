import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.linear_model import LogisticRegression

import adasim
from adasim.config import ViewsConfig
from adasim.data import ArrayImages, BatchedViews, open_images, synthetic
from adasim.eval import extract, linear_probe
from adasim.eval.encoder import Encoder
from adasim.eval.evaluation import Extractor
from adasim.eval.linear import LinearResult, Score, StackedHeads, augmented_batches
from adasim.eval.splits import hold_out
from adasim.models import Backbone, EvalTransform
from adasim.util.errors import UserError

CPU = torch.device("cpu")
SMALL = EvalTransform.of_size(16, (0.5,), (0.25,))


def clusters(n, classes, dim, seed, noise=1.0):
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(7))
    g = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    return centres[labels] + noise * torch.randn(n, dim, generator=g), labels


def one_head(start, batches, epochs, lr, lars):
    """One head by torch's own layer, loss, autograd and SGD, with LARS and the schedule written out."""
    head = torch.nn.Linear(start.weight.shape[2], start.weight.shape[1])
    with torch.no_grad():
        head.weight.copy_(start.weight[0])
        head.bias.copy_(start.bias[0])
    sgd = torch.optim.SGD(head.parameters(), lr=lr, momentum=0.9)
    for epoch in range(epochs):
        sgd.param_groups[0]["lr"] = lr * 0.5 * (1 + math.cos(math.pi * epoch / epochs))
        for features, labels in batches(epoch):
            sgd.zero_grad()
            torch.nn.functional.cross_entropy(head(features), labels).backward()
            for p in head.parameters():
                if lars and p.grad is not None and p.norm() != 0 and p.grad.norm() != 0:
                    p.grad *= 0.001 * p.norm() / (p.grad.norm() + 1e-8)
            sgd.step()
    return head


@pytest.mark.parametrize("lars", [False, True])
def test_each_stacked_head_takes_the_steps_of_a_head_of_its_own(lars):
    features, labels = clusters(60, 4, 9, seed=0)
    rates = torch.tensor([0.01, 0.3, 2.0])
    stacked, start = (StackedHeads(n, 9, 4, seed=5, lars=lars, device=CPU) for n in (3, 1))
    batches = [(features[i::4], labels[i::4]) for i in range(4)]
    for batch in batches:
        stacked.step(*batch, rates)
    for i, rate in enumerate(rates.tolist()):
        alone = one_head(start, lambda _: batches, 1, rate, lars)
        torch.testing.assert_close(stacked.weight[i], alone.weight.data, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(stacked.bias[i], alone.bias.data, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("protocol", ["dino", "simsiam"])
def test_a_whole_training_equals_the_protocol_written_out(protocol):
    features, labels = clusters(96, 12, 5, seed=0, noise=1.5)
    test, test_labels = clusters(200, 12, 5, seed=1, noise=1.5)

    def batches(epoch):
        order = torch.arange(96).roll(epoch)
        return [(features[ids], labels[ids]) for ids in order.split(40)]  # the last batch is smaller

    settings: dict[str, Any] = {"epochs": 4, "batch_size": 40, "protocol": protocol}
    result = linear_probe(
        batches, None, test, test_labels, num_classes=12, rates=[0.02, 0.5, 1e38], **settings
    )
    lars = protocol == "simsiam"
    start = StackedHeads(1, 5, 12, seed=0, lars=lars, device=CPU)
    for score in result.epochs[-1][:2]:
        head = one_head(start, batches, 4, score.rate * 40 / 256, lars)
        five = head(test).topk(5, dim=1).indices == test_labels[:, None]
        expected = (float(hits.double().mean() * 100) for hits in (five[:, 0], five.any(dim=1)))
        assert (score.top1, score.top5) == pytest.approx(tuple(expected), abs=0.51)  # one image on the edge
        assert score.top5 > score.top1 + 10
    assert protocol == "simsiam" or result.epochs[-1][2][::3] == (0, 0)  # a rate that diverged


def test_heads_begin_at_normal_weights_of_deviation_0_01_and_zero_biases():
    heads = StackedHeads(2, 300, 100, seed=3, lars=False, device=CPU)
    assert heads.weight.std().item() == pytest.approx(0.01, rel=0.02)
    assert abs(heads.weight.mean().item()) < 2e-4
    assert not heads.bias.any()
    assert torch.equal(heads.weight[0], heads.weight[1])
    assert not torch.equal(heads.weight, StackedHeads(2, 300, 100, seed=4, lars=False, device=CPU).weight)


@pytest.mark.parametrize("protocol", ["dino", "simsiam"])
def test_the_probe_agrees_with_logistic_regression_within_a_point(protocol):
    train, train_labels = clusters(3000, 10, 32, seed=0, noise=2.0)
    test, test_labels = clusters(3000, 10, 32, seed=1, noise=2.0)
    reference = LogisticRegression(max_iter=500).fit(train.numpy(), train_labels.numpy())
    expected = 100 * reference.score(test.numpy(), test_labels.numpy())
    assert 60 < expected < 99  # neither hopeless nor saturated
    rates = [0.01, 0.03, 0.1] if protocol == "dino" else [0.1, 1.0, 10.0]
    result = linear_probe(
        train, train_labels, test, test_labels, rates=rates, epochs=30, batch_size=256, protocol=protocol
    )
    assert result.last.top1 == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("protocol", "rate", "epochs", "batch_size"),
    [("dino", 0.001, 100, 1024), ("simsiam", 0.1, 90, 4096), ("simsiam-sgd", 30.0, 90, 256)],
)
def test_an_omitted_setting_is_the_published_one(protocol, rate, epochs, batch_size):
    data = (*clusters(40, 2, 3, seed=0), *clusters(20, 2, 3, seed=1))
    result = linear_probe(*data, protocol=protocol)
    named: dict[str, Any] = {"rates": [rate], "epochs": epochs, "batch_size": batch_size}
    assert result == linear_probe(*data, protocol=protocol, **named)
    assert (result.last.rate, len(result.epochs)) == (rate, epochs)


def test_best_and_last_epochs():
    table = [[(50.0, 20.0), (80.0, 50.0)], [(70.0, 65.0), (91.0, 95.0)], [(60.0, 68.0), (94.0, 96.0)]]
    scores = [
        tuple(Score(a, rate, epoch, b) for rate, a, b in zip((0.1, 1.0), *row, strict=True))
        for epoch, row in enumerate(table, 1)
    ]
    result = LinearResult(tuple(scores))
    assert result.best == (70.0, 0.1, 2, 91.0)
    assert result.last == (68.0, 1.0, 3, 96.0)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ((torch.full((2, 3), torch.nan), torch.tensor([0, 1])), "a training batch has a NaN"),
        ((torch.zeros(2, 4), torch.tensor([0, 1])), "4 wide with labels up to 1, but test_features are 3"),
        ((torch.zeros(2, 3), torch.tensor([0, 2])), "up to 2, but .* num_classes=2"),
        ((torch.zeros(2, 3), torch.tensor([0, -1])), "1 of 2 images have no label"),
        (None, "Epoch 0 of the linear probe has no images"),
    ],
)
def test_bad_batches_of_a_stream_are_refused(batch, sentence):
    with pytest.raises(UserError, match=sentence):
        linear_probe(lambda _: [batch] if batch else [], None, torch.zeros(2, 3), [0, 1], num_classes=2)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"protocol": "moco"}, "'moco' is unknown"),
        ({"rates": [0.1, 0.0]}, "rates=0.0 must be above 0"),
        ({"rates": []}, "rates=0 must be above 0"),
        ({"epochs": 0}, "epochs=0 must be above 0"),
        ({"batch_size": 0}, "batch_size=0 must be above 0"),
    ],
)
def test_impossible_settings_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        linear_probe(torch.eye(2), [0, 1], torch.eye(2), [0, 1], **options)


@pytest.mark.parametrize("flip", [0.5, 0.0])
def test_augmented_batches_are_crops_of_8_to_100_percent_and_flips_with_their_own_labels(flip: float) -> None:
    images, ids = synthetic(40, 16), torch.arange(40)
    pixels = Backbone(torch.nn.Flatten(), {"dim": 768})
    extractor = Extractor(Encoder("pixels", pixels, SMALL, ""), workers=0, cached=False, seed=3)
    make = augmented_batches(extractor, images, ids, flip, "pooled", batch_size=16)
    plain: dict[str, Any] = {"color": 0.0, "blur": 0.0, "solarize": 0.0, "mean": SMALL.mean, "std": SMALL.std}
    settings = ViewsConfig(size=16, scale=(0.08, 1.0), interpolation="bilinear", flip=flip, **plain)
    views, mirrored = BatchedViews(settings), BatchedViews(replace(settings, flip=1.0))
    for epoch in (0, 1):
        made = list(make(epoch))
        assert len(made) == 2
        for features, labels in made:
            wanted = views(images.images[labels], 1, 3, epoch, labels)
            assert torch.equal(features, wanted.flatten(1))
            other_way = mirrored(images.images[labels], 1, 3, epoch, labels).flip(3)
            unlike = (wanted - other_way).abs().amax((1, 2, 3)) > 1e-4  # those that are mirrored
            assert unlike.any() == bool(flip)


# `adasim eval linear`

MakeRun = Callable[..., Path]


@pytest.mark.parametrize(
    ("model", "method", "rate"),
    [("vit_mini", "dino", 0.001), ("resnet_tiny", "dino", 0.03), ("resnet_tiny", "simsiam", 0.1)],
)
def test_the_rate_is_the_published_one_of_method_and_architecture(
    make_run: MakeRun, model: str, method: str, rate: float
) -> None:
    run = make_run(model=model, method=method, source="synthetic:64")
    report = adasim.evaluate(run, "linear", epochs=2)
    assert report.metrics["rate"] == rate
    assert report.value == report.metrics["top1_best"]
    assert report.results[0].setting == f"{method}, quick, published rate, epochs=2"
    assert f"The rate, {rate:g} per 256 images, is the published one" in str(report)
    # An encoder without its run: DINO's protocol, by the architecture.
    foreign = adasim.evaluate(adasim.load_backbone(run), "linear", data="synthetic:64", epochs=1)
    assert foreign.metrics["rate"] == (0.001 if model == "vit_mini" else 0.03)


@pytest.mark.parametrize("mode", ["quick", "augmented"])
def test_a_sweep_chooses_on_held_out_training_images_whatever_the_test_labels(
    make_run: MakeRun, mode: str
) -> None:
    run = make_run(source="synthetic:320")
    train, test = (open_images("synthetic:320", size=16, split=split) for split in ("train", "test"))
    assert test.labels is not None
    wrong = ArrayImages("wrong", test.as_array(), test.labels.roll(1), classes=test.classes)  # type: ignore[arg-type]
    epochs = 10 if mode == "quick" else 2
    settings: dict[str, Any] = {
        "rates": (1e-4, 1, 100),
        "epochs": epochs,
        "batch_size": 32,
        "protocol": "dino",
    }
    options: dict[str, Any] = settings | {"save": False, mode: True}
    reports = [adasim.evaluate(run, "linear", train=train, test=one, **options) for one in (test, wrong)]
    one, other = (report.metrics for report in reports)
    assert one["top1_last"] != other["top1_last"]
    assert "top1_best" not in one
    for name in ("rate", "rates", "held_out_top1_by_rate"):
        assert one[name] == other[name]
    best = max(range(3), key=lambda i: one["held_out_top1_by_rate"][i])
    assert one["rate"] == options["rates"][best]
    assert reports[0].value == one["top1_last"]
    assert (
        reports[0].results[0].setting
        == f"dino, {mode}, swept rate, epochs={epochs}, batch=32, rates=0.0001 1 100"
    )
    assert "chosen on held-out training images" in str(reports[0])
    # The rate then learns from all training images, as it would have alone.
    alone = adasim.evaluate(run, "linear", train=train, test=test, **options | {"rates": one["rate"]})
    assert alone.metrics["top1_last"] == one["top1_last"]
    if mode == "quick":
        backbone = adasim.load_backbone(run)
        features = extract(backbone, train, backbone.transform)
        labels = train.labels
        assert labels is not None
        rest, held = hold_out(labels, 320, 0)
        tried = linear_probe(features[rest], labels[rest], features[held], labels[held], **settings)
        assert [score.top1 for score in tried.epochs[-1]] == one["held_out_top1_by_rate"]


def test_a_sweep_of_one_rate_is_refused_and_its_edge_is_told(make_run: MakeRun) -> None:
    run = make_run()
    with pytest.raises(UserError, match="name several with --rates"):
        adasim.evaluate(run, "linear", sweep=True, rates=0.1)
    with pytest.raises(UserError, match=r"fewer than five images, too few .* Name one rate"):
        adasim.evaluate(run, "linear", sweep=True, data="synthetic:64")
    report = adasim.evaluate(run, "linear", sweep=True, rates=(1e-9, 1e-8), epochs=1)
    assert "at the edge of the sweep" in str(report)
