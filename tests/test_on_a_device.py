"""Views, evaluations and methods on a pretend GPU: its rules are kept, and the answers are the CPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerator import Accelerator
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from adasim.config import Config, ModelConfig, ViewsConfig
from adasim.data import open_images
from adasim.data.augment import BatchedViews
from adasim.eval import fewshot_accuracy, knn_accuracy
from adasim.eval.features import extract
from adasim.eval.linear import linear_probe
from adasim.methods import DinoSettings, EncodedView, SimSiamSettings, Step, build_method
from adasim.models import EvalTransform, build_backbone
from adasim.recipes import get_recipe
from adasim.registry import METHODS

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("recipe", ["dino", "simsiam"])
@pytest.mark.parametrize("shape", [(3, 24, 24), (1, 40, 33)])
def test_views_made_on_a_device_are_those_of_a_cpu(recipe: str, shape: tuple[int, ...]) -> None:
    images = torch.randint(256, (13, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views = BatchedViews(ViewsConfig(**METHODS[recipe].VIEWS, size=16, local_crops=1, local_size=8))
    ids = torch.arange(13)
    for view in (1, 2, 3):
        expected = views(images, view, 0, 5, ids)
        found = views(images.to("cuda"), view, 0, 5, ids.to("cuda"))
        assert found.is_cuda
        assert torch.equal(found.cpu(), expected)


def labelled() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    labels = torch.randint(6, (400,), generator=generator)
    return torch.randn(6, 16, generator=generator)[labels] + torch.randn(400, 16, generator=generator), labels


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("labels_too", [False, True])
def test_evaluations_of_features_on_a_device_give_a_cpus_figures(labels_too: bool) -> None:
    features, labels = labelled()
    there = features.to("cuda")
    theirs = labels.to("cuda") if labels_too else labels
    expected = knn_accuracy(features[:300], labels[:300], features[300:], labels[300:], k=[1, 20])
    assert knn_accuracy(there[:300], theirs[:300], there[300:], theirs[300:], k=[1, 20]) == expected
    for per_class in (False, True):
        assert fewshot_accuracy(there, theirs, episodes=40, per_class=per_class) == fewshot_accuracy(
            features, labels, episodes=40, per_class=per_class
        )
    probe = linear_probe(features[:300], labels[:300], features[300:], labels[300:], epochs=2)
    assert linear_probe(there[:300], theirs[:300], there[300:], theirs[300:], epochs=2) == probe


@pytest.mark.usefixtures("gpu")
def test_features_extracted_on_a_device_are_a_cpus() -> None:
    images, transform = open_images("synthetic:32"), EvalTransform.for_run(get_recipe("demo"))
    encoder = build_backbone(ModelConfig(name="resnet_tiny"), 32, student=False)
    expected = extract(encoder, images, transform, progress=False)
    assert torch.equal(extract(encoder, images, transform, device="cuda", progress=False), expected)


def configured(method: str, model: str) -> Config:
    return Config(
        method=method,
        model=ModelConfig(name=model, patch_size=8),
        views=ViewsConfig(size=32),
        settings=DinoSettings(out_dim=24, hidden_dim=32, bottleneck_dim=16)
        if method == "dino"
        else SimSiamSettings(proj_dim=32, pred_dim=16),
    )


def in_halves(method: Any, views: list[Tensor]) -> Step:
    seen = [method.encode(view) for view in views[:2]] + [EncodedView(view) for view in views[2:]]
    for view in seen:
        method.predict(view)
    return method.loss(seen, 0)


NETWORKS = [(m, n) for m in ("dino", "simsiam") for n in ("vit_mini", "resnet_tiny")]


@pytest.mark.parametrize("precision", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "model"), NETWORKS)
def test_every_methods_forward_pass_stays_on_the_device(
    name: str, model: str, precision: torch.dtype | None
) -> None:
    """torch's own fake tensors know for every operation of CUDA which devices and shapes it takes."""
    method = build_method(configured(name, model), 32).train()
    with Accelerator().announced(), FakeTensorMode(allow_non_fake_inputs=True):
        method.to_empty(device="cuda")
        sizes = (32, 32, 16) if name == "dino" else (32, 32)
        views = [torch.rand(4, 3, size, size, device="cuda") for size in sizes]
        with torch.autocast("cuda", precision or torch.bfloat16, enabled=precision is not None):
            steps = [method(views, 0), in_halves(method, views)]
        for step in steps:
            tensors = [step.loss, step.feature, *step.diagnostics.values()]
            assert {t.device for t in tensors} == {torch.device("cuda", 0)}
            assert step.loss.dtype == step.feature.dtype == torch.float32
        method.after_step(0, 10)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "model"), NETWORKS)
def test_a_forward_pass_on_a_device_gives_a_cpus_bits(name: str, model: str) -> None:
    generator = torch.Generator().manual_seed(0)
    views = [torch.rand(4, 3, 32, 32, generator=generator) for _ in range(2)]
    config = configured(name, model)
    config.model.drop_path = 0.0
    torch.manual_seed(0)
    method = build_method(config, 32).train()
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        expected = method(views, 0)
        torch.manual_seed(0)
        there = build_method(config, 32).train().to("cuda")
        found = there([view.to("cuda") for view in views], 0)
    assert torch.equal(found.loss.cpu(), expected.loss)
    assert torch.equal(found.feature.cpu(), expected.feature)
