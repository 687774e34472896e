"""DINO against explicit loops over the published formulas."""

import copy
import math
from typing import Any

import pytest
import torch

from adasim.config import Config, ModelConfig, OptimConfig
from adasim.methods import Dino, DinoSettings, EncodedView, build_method
from adasim.methods.dino import teacher_temperature
from adasim.recipes import get_recipe
from adasim.train.loop import set_schedules
from adasim.train.state import build_optimizer
from adasim.util.errors import UserError

SMALL: dict[str, Any] = {"out_dim": 6, "hidden_dim": 16, "bottleneck_dim": 8}


def dino(name="vit_mini", drop_path=0.0, seed=0, **kwargs):
    torch.manual_seed(seed)
    model = ModelConfig(name=name, patch_size=8, drop_path=drop_path)
    return Dino(model, DinoSettings(**{**SMALL, **kwargs}), 16, 1)


def moved(**kwargs):
    """With a student that is no longer the teacher."""
    method = dino(**kwargs).train()
    with torch.no_grad():
        for p in method.student.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return method


def config(seed=0):
    model = ModelConfig(name="vit_mini", patch_size=8, drop_path=0.0)
    optim = OptimConfig(warmup_epochs=0, weight_decay=0.1, weight_decay_end=0.1)
    sizes: Any = {"model": model, "optim": optim, "settings": DinoSettings(**SMALL)}
    return Config(method="dino", epochs=4, batch_size=256, seed=seed, **sizes)


def views(count=2, batch=5, size=16, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, 1, size, size, generator=generator) for _ in range(count)]


def seen_with(targets, outputs):
    """Views whose logits are given, as if the networks had produced them."""
    feature = torch.randn(len(targets[0]), 3)
    pairs = [EncodedView(torch.empty(0), feature, t, o) for t, o in zip(targets, outputs, strict=False)]
    return pairs + [EncodedView(torch.empty(0), output=o) for o in outputs[len(targets) :]]


def loss_by_loops(targets, outputs, center, student_temp, teacher_temp):
    """DINO's loss with multi-crop: mean over t != s of -sum_k teacher_k log student_k, in plain Python."""
    terms = []
    for t, target in enumerate(targets):
        for s, output in enumerate(outputs):
            if s == t:
                continue
            total = 0.0
            for b in range(len(target)):
                logits = [(x - c) / teacher_temp for x, c in zip(target[b].tolist(), center, strict=True)]
                norm = sum(math.exp(x) for x in logits)
                answers = [x / student_temp for x in output[b].tolist()]
                log_norm = math.log(sum(math.exp(x) for x in answers))
                for x, y in zip(logits, answers, strict=True):
                    total -= math.exp(x) / norm * (y - log_norm)
            terms.append(total / len(target))
    return sum(terms) / len(terms)


@pytest.mark.parametrize("local", [0, 3])
def test_loss_equals_explicit_loops(local):
    method = dino(teacher_temp_start=0.04, teacher_temp=0.07, teacher_temp_warmup_epochs=4)
    method.center.copy_(torch.randn(1, 6) * 0.1)
    targets = [torch.randn(3, 6) * 0.3 for _ in range(2)]
    outputs = [torch.randn(3, 6) * 0.3 for _ in range(2 + local)]
    step = method.loss(seen_with(targets, outputs), epoch=2)
    expected = loss_by_loops(targets, outputs, method.center[0].tolist(), 0.1, 0.04 + 0.03 * 2 / 3)
    assert step.loss.item() == pytest.approx(expected, rel=1e-5)


def test_diagnostics_are_entropy_kl_and_spread():
    method = dino()
    targets, outputs = ([torch.randn(3, 6) * 0.1 for _ in range(2)] for _ in range(2))
    step = method.loss(seen_with(targets, outputs), epoch=0)
    teacher = [((x - method.center) / 0.04).softmax(1) for x in targets]
    entropy = sum(-(p * p.log()).sum(1).mean() for p in teacher) / 2
    student = [(x / 0.1).log_softmax(1) for x in outputs]
    kl = sum((teacher[t] * (teacher[t].log() - student[1 - t])).sum(1).mean() for t in (0, 1)) / 2
    torch.testing.assert_close(step.diagnostics["teacher_entropy"], entropy)
    torch.testing.assert_close(step.diagnostics["kl"], kl, rtol=1e-4, atol=1e-6)
    unit = step.feature / step.feature.norm(dim=1, keepdim=True)
    spread = unit.std(0, correction=0).mean() * unit.shape[1] ** 0.5
    torch.testing.assert_close(step.diagnostics["feature_spread"], spread)


def test_center_is_used_first_and_moves_only_after_a_sound_step():
    method = dino(center_momentum=0.9)
    before = torch.randn(1, 6)
    method.center.copy_(before)
    bad = [torch.full((3, 6), math.nan)] * 2
    assert not method.loss(seen_with(bad, bad), epoch=0).loss.isfinite()  # such a step is skipped
    targets = [torch.randn(3, 6) for _ in range(2)]
    method.loss(seen_with(targets, targets), epoch=0)
    assert torch.equal(method.center, before)  # the loop has yet to judge the loss
    method.after_step(0, 10)
    torch.testing.assert_close(method.center, 0.9 * before + 0.1 * torch.cat(targets).mean(0, keepdim=True))


def test_student_and_teacher_start_equal_and_the_teacher_has_neither_gradient_nor_drop_path():
    method = dino(drop_path=0.5)
    pairs = zip(method.student.state_dict().items(), method.teacher.state_dict().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)
    assert any(type(m).__name__ == "DropPath" for m in method.student.modules())
    assert not any(type(m).__name__ == "DropPath" for m in method.teacher.modules())
    method.train()
    method(views(), epoch=0).loss.backward()
    assert all(p.grad is None for p in method.teacher.parameters())
    assert all(p.grad is not None for p in method.student.parameters())


def test_teacher_moves_every_step_by_the_cosine_momentum_parameters_only():
    method = dino("resnet_tiny", teacher_momentum=0.9)
    with torch.no_grad():
        for p in method.student.parameters():
            p.normal_()
    before = copy.deepcopy(method.teacher)
    for buffer in method.student.buffers():
        buffer.fill_(3)
    method.after_step(step=5, total_steps=20)
    m = 1 - 0.1 * (math.cos(math.pi * 5 / 20) + 1) / 2
    networks = (before, method.student, method.teacher)
    for old, student, new in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(new, m * old + (1 - m) * student)
    assert all(map(torch.equal, before.buffers(), method.teacher.buffers()))


def test_teacher_batch_norm_uses_the_batch_and_keeps_statistics_of_its_own_forward():
    method = dino("resnet_tiny").train()
    pair = views()
    conv, norm = method.teacher.backbone.net.conv1[0], method.teacher.backbone.net.conv1[1]
    output = conv(torch.cat(pair))  # both global views in one forward pass
    step = method(pair, epoch=0)
    torch.testing.assert_close(norm.running_mean, 0.1 * output.mean((0, 2, 3)))
    assert method.teacher.training
    # Batch statistics: the feature depends on the rest of the batch.
    fewer = method([v[:3] for v in pair], epoch=0)
    assert (fewer.feature - step.feature[:3]).abs().max() > 1e-4


def test_cached_feature_is_the_teachers_of_view_1_before_this_steps_average():
    method, pair = moved(drop_path=0.3), views()
    expected = method.teacher.backbone(pair[0])
    step = method(pair, epoch=0)
    torch.testing.assert_close(step.feature, expected)
    assert step.feature.dtype == torch.float32
    assert not step.feature.requires_grad
    assert method.feature_dim == step.feature.shape[1] == 96
    assert method.eval_encoder is method.teacher.backbone


def test_a_cached_neighbour_is_the_target_of_all_views_where_there_is_one():
    """With the length of the image's own feature, through the teacher's head; by hand for each image."""
    method = moved()
    batch = views() + views(1, size=8, seed=2)
    cached = torch.nn.functional.normalize(torch.randn(5, 96), dim=1)
    cached[3] = 0  # an image that is its own partner
    step = method(batch, epoch=1, neighbours=cached)
    one, two = [], []  # targets of view 2 and of view 1
    for b in range(5):
        own = [method.teacher.backbone(view[b : b + 1]) for view in batch[:2]]
        there = own[0].norm() * cached[b : b + 1]
        one.append(method.teacher.head(own[0] if b == 3 else there)[0])
        two.append(method.teacher.head(own[1] if b == 3 else there)[0])
    outputs = [method.student.head(method.student.backbone(view)) for view in batch]
    targets = [torch.stack(one), torch.stack(two)]
    temperature = teacher_temperature(method.config, 1)
    expected = loss_by_loops(targets, outputs, method.center[0].tolist(), 0.1, temperature)
    assert step.loss.item() == pytest.approx(expected, rel=1e-4)
    assert step.loss.item() != pytest.approx(method(batch, epoch=1).loss.item(), rel=1e-3)
    torch.testing.assert_close(step.feature, method.teacher.backbone(batch[0]))


@pytest.mark.parametrize("count", [2, 4])
def test_the_step_in_halves_equals_the_whole(count):
    method = dino().train()
    twin = copy.deepcopy(method)
    batch = views() + views(count - 2, size=8, seed=2)
    whole = method(batch, epoch=1)
    whole.loss.backward()
    seen = [twin.encode(view) for view in batch[:2]] + [EncodedView(view) for view in batch[2:]]
    for view in seen:
        twin.predict(view)
    halves = twin.loss(seen, epoch=1)
    halves.loss.backward()
    torch.testing.assert_close(halves.loss, whole.loss)
    torch.testing.assert_close(halves.feature, whole.feature)
    for a, b in zip(method.student.parameters(), twin.student.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
    method.after_step(0, 10)
    twin.after_step(0, 10)
    torch.testing.assert_close(method.center, twin.center)


def test_last_layer_stands_still_in_its_frozen_epochs_decay_included():
    settings = config()
    method: Any = build_method(settings, 16, 1)
    optimizer = build_optimizer(method, settings)
    head = method.student.head
    before = copy.deepcopy(head)

    def learns(epoch):
        """Which of the last layer's parameters have moved since the beginning, after a step in this epoch."""
        set_schedules(optimizer, settings, epoch * 2 + 1, 2)
        optimizer.zero_grad()
        method(views(), epoch).loss.backward()
        method.before_optimizer(epoch)
        optimizer.step()
        old = before.last_layer.state_dict()
        return [name for name, p in head.last_layer.state_dict().items() if not torch.equal(p, old[name])]

    assert learns(0) == []
    assert not torch.equal(head.mlp[0].weight, before.mlp[0].weight)
    assert learns(1) == ["weight_v", "weight_g"]


def test_only_biases_and_one_dimensional_tensors_are_spared_from_decay():
    method = dino()
    groups = method.param_groups(OptimConfig())
    decay = {id(p): group["decay"] for group in groups for p in group["params"]}
    for name, p in method.student.named_parameters():
        assert decay[id(p)] == (p.ndim > 1), name
    net = method.student.backbone.net
    assert all(decay[id(p)] for p in (net.cls_token, net.pos_embed, method.student.head.last_layer.weight_g))
    assert len(decay) == len(list(method.student.parameters()))
    frozen = dino(norm_last_layer=True)
    ids = {id(p) for group in frozen.param_groups(OptimConfig()) for p in group["params"]}
    assert id(frozen.student.head.last_layer.weight_g) not in ids
    (everything,) = method.param_groups(OptimConfig(decay_all=True))
    assert everything["decay"]


def test_first_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(1)
    a: Any = build_method(config(seed=3), 16, 1)
    state = torch.get_rng_state()
    b = build_method(config(seed=3), 16, 1)
    assert torch.equal(state, torch.get_rng_state())
    c: Any = build_method(config(seed=4), 16, 1)
    assert all(map(torch.equal, a.parameters(), b.parameters()))
    assert not torch.equal(*(next(method.student.head.parameters()) for method in (a, c)))


def test_local_views_that_the_patches_do_not_divide_are_refused_before_anything_is_written() -> None:
    config = get_recipe("desk-vit")
    config.views.local_crops, config.views.local_size = 2, 10
    with pytest.raises(
        UserError, match=r"patch_size=4 does not divide views.local_size=10.* --views.local-size"
    ):
        config.check(1000, False)
    config.views.local_size = 12
    config.check(1000, False)
