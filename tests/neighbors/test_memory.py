"""The memory against a second implementation from the equations: dictionaries, one image at a time."""

import math
from collections import Counter
from random import Random
from typing import Any, Literal

import helpers
import numpy as np
import pytest
import torch
from exact_search import by_fp64
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adasim.neighbors import NeighborMemory
from adasim.neighbors.memory import Ids
from adasim.neighbors.window import on_grid, ranked_sums
from adasim.util.seeding import uniform


class BruteForce:
    """Equations of the paper, section by section, with the released code's order of events."""

    def __init__(self, n: int, dim: int, window: int, k: int, support: str, timing: str) -> None:
        self.n, self.window, self.k, self.support, self.timing = n, window, k, support, timing
        self.cache = [[0.0] * dim for _ in range(n)]
        self.finished: list[list[dict[int, float]]] = []  # epoch -> image -> {neighbour: similarity}
        self.current: list[dict[int, float]] = [{} for _ in range(n)]
        self.observing = False

    def observe(self, ids: list[int], features: Tensor) -> list[list[int]]:
        lists: list[dict[int, float] | None] = []
        rows: list[list[float]] = []
        for feature in features:  # every query meets the cache as it was before the batch
            if not torch.isfinite(feature).all():
                lists.append(None)
                rows.append([])
                continue
            unit = torch.nn.functional.normalize(feature, dim=0)
            z = ((unit * 2**24).round() / 2**24).tolist()
            scores = [
                float(torch.tensor(math.fsum(a * b for a, b in zip(z, row, strict=True))))
                for row in self.cache
            ]
            best = sorted(range(self.n), key=lambda j: (-scores[j], j))[: self.k]
            lists.append({j: round(min(1.0, max(-1.0, scores[j])) * 2**24) / 2**24 for j in best})
            rows.append(z)
        for i, found, z in zip(ids, lists, rows, strict=True):
            if found is not None:
                self.current[i], self.cache[i] = found, z
        self.observing = True
        return [[-1] * self.k if found is None else list(found) for found in lists]

    def end_epoch(self) -> None:
        self.finished.append(self.current)
        self.current = [{} for _ in range(self.n)]
        self.observing = False

    def distribution(self, i: int, tau: float) -> list[tuple[int, float]]:
        epochs = self.finished[-self.window :]
        if self.timing == "current" and self.observing:
            epochs = [*self.finished, self.current][-self.window :]
        m: dict[int, float] = {}
        for lists in epochs:
            for j, similarity in lists[i].items():
                m[j] = m.get(j, 0.0) + similarity
        ranked = sorted(m, key=lambda j: (-m[j], j))
        if self.support == "topk":
            ranked = ranked[: self.k]
        if not ranked:
            return []
        top = m[ranked[0]] / self.window
        weights = [math.exp((m[j] / self.window - top) / tau) for j in ranked]
        return [(j, weight / sum(weights)) for j, weight in zip(ranked, weights, strict=True)]

    def draw(self, i: int, epoch: int, tau: float, seed: int) -> int:
        if tau == 0 or len(self.finished) < self.window:
            return i
        support = self.distribution(i, tau)
        if not support or support[0][0] != i:
            return i
        u = float(uniform(seed, "partner", epoch, torch.tensor([i])))
        total = 0.0
        for j, p in support:
            total += p
            if u < total:
                return j
        return support[-1][0]


def assert_agree(
    memory: NeighborMemory, oracle: BruteForce, epoch: int, tau: float, images: list[int]
) -> None:
    neighbours, p = memory.distribution(torch.tensor(images), tau)
    for row, i in enumerate(images):
        expected = oracle.distribution(i, tau)
        assert neighbours[row][: len(expected)].tolist() == [j for j, _ in expected]
        assert p[row][: len(expected)].tolist() == pytest.approx([q for _, q in expected], abs=1e-12)
        assert (neighbours[row][len(expected) :] == -1).all()
        assert (p[row][len(expected) :] == 0).all()
    drawn = memory.draw_partners(epoch, tau, 7, torch.tensor(images))
    assert drawn.tolist() == [oracle.draw(i, epoch, tau, 7) for i in images]


@pytest.mark.parametrize("support", ["topk", "union"])
@pytest.mark.parametrize("timing", ["previous", "current"])
@given(draw=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_memory_equals_the_brute_force(
    support: Literal["topk", "union"], timing: Literal["previous", "current"], draw: Random
) -> None:
    """Ties (coarse features), negative similarities, unvisited images, of an id that stands twice the last, features
    that are not finite and change nothing, windows that are not yet full, w=1, K=1, N=1.

    An image meets the cache as it was before its batch: written first, it would find itself at similarity 1, and the
    gate would always open.
    """
    generator = torch.Generator().manual_seed(draw.randint(0, 2**20))
    n, dim, window = draw.randint(1, 9), draw.randint(1, 4), draw.randint(1, 4)
    k, drop = draw.randint(1, min(5, n)), draw.randint(0, 3)
    tau, coarse, bad = draw.choice([0.05, 0.2, 1.0]), draw.choice([True, False]), draw.choice([True, False])
    memory = NeighborMemory(n, dim, window, k, support=support, timing=timing)
    oracle = BruteForce(n, dim, window, k, support, timing)
    base = torch.randn(n, dim, generator=generator)
    for epoch in range(window + 2):
        if timing == "previous":
            assert_agree(memory, oracle, epoch, tau, list(range(n)))
        order = torch.randperm(n, generator=generator)[: max(1, n - drop)]
        for batch in order.split(3):
            batch = torch.cat([batch, batch[:1]])  # the first image twice
            features = base[batch] + 0.5 * torch.randn(len(batch), dim, generator=generator)
            if coarse:
                features = features.sign() + (features == 0)
            if bad:
                features[-1, 0] = draw.choice([math.nan, math.inf, -math.inf])
            similarities, neighbours = memory.observe(batch, features)
            assert neighbours.tolist() == oracle.observe(batch.tolist(), features)
            assert torch.equal(similarities == -torch.inf, neighbours == -1)
            if timing == "current":
                assert_agree(memory, oracle, epoch, tau, batch.tolist())
        memory.end_epoch()
        oracle.end_epoch()
    assert_agree(memory, oracle, window + 2, tau, list(range(n)))


@pytest.mark.parametrize("support", ["topk", "union"])
def test_no_images_have_no_neighbours(support: Literal["topk", "union"]) -> None:
    memory = NeighborMemory(3, 2, window=1, k=2, support=support)
    none = torch.empty(0, dtype=torch.long)
    assert [found.shape for found in memory.observe(none, torch.empty(0, 2))] == [(0, 2), (0, 2)]
    memory.end_epoch()
    assert [found.shape for found in memory.distribution(none, 0.2)] == [(0, 2), (0, 2)]
    assert memory.draw_partners(1, 0.2, 0, none).shape == (0,)


def test_the_gate_by_hand() -> None:
    """Two epochs, w=2, K=2. Image 0 finds itself (0.9 + 0.7) and image 1 (0.8 + 0.6); the divisor is w."""
    memory = NeighborMemory(3, 2, window=2, k=2)
    memory.history_ids[0] = torch.tensor([[0, 1], [0, 1]])
    memory.history_similarities[0] = torch.tensor([[0.875, 0.75], [0.625, 0.5]])
    memory.history_ids[1] = torch.tensor([[0, 1], [2, 1]])  # image 1: itself 0.5+0.5, 0: 0.75, 2: 0.625
    memory.history_similarities[1] = torch.tensor([[0.75, 0.5], [0.625, 0.5]])
    memory.history_ids[2] = torch.tensor([[0, 2], [-1, -1]])  # image 2: missed the second epoch
    memory.history_similarities[2] = torch.tensor([[0.75, 0.5], [0.0, 0.0]])
    memory.epochs = 2
    neighbours, p = memory.distribution(torch.arange(3), tau=0.25)
    assert neighbours.tolist() == [[0, 1], [1, 0], [0, 2]]
    means = torch.tensor([[0.75, 0.625], [0.5, 0.375], [0.375, 0.25]], dtype=torch.float64)
    assert torch.allclose(p, (means / 0.25).softmax(1), atol=1e-12)
    partners = torch.stack([memory.draw_partners(2, 0.25, seed) for seed in range(50)])
    assert [set(drawn.tolist()) for drawn in partners.T] == [
        {0, 1},
        {0, 1},
        {2},
    ]  # image 2 is not its own best


def filled(epochs: int, num_images: int, dim: int, window: int, k: int, **options: Any) -> NeighborMemory:
    """After epochs of random features."""
    generator = torch.Generator().manual_seed(6)
    memory = NeighborMemory(num_images, dim, window, k, **options)
    for _ in range(epochs):
        memory.observe(torch.arange(num_images), torch.randn(num_images, dim, generator=generator))
        memory.end_epoch()
    return memory


def test_tau_zero_means_standard_pairs() -> None:
    memory = filled(3, 20, 4, window=1, k=3)
    assert torch.equal(memory.draw_partners(3, 0.0, 0), torch.arange(20))
    neighbours, p = memory.distribution(torch.tensor([4, 9]), 0.0)
    assert neighbours.tolist() == [[4], [9]]
    assert p.tolist() == [[1.0], [1.0]]


def test_a_memory_of_either_support_is_asked_for_the_other() -> None:
    topk, union = (filled(3, 30, 4, window=3, k=2, support=kind) for kind in ("topk", "union"))
    for asked, expected in ((topk, union), (union, topk)):
        lists = asked.distribution(torch.arange(30), 0.2, support=expected.support)
        assert all(map(torch.equal, lists, expected.distribution(torch.arange(30), 0.2)))
    with pytest.raises(ValueError, match="support='best'"):
        topk.distribution([0], 0.2, support="best")  # type: ignore[arg-type]


def test_a_long_list_of_ids_is_ranked_in_chunks() -> None:
    memory = filled(2, 700, 4, window=2, k=3, support="union")
    whole = memory.distribution(torch.arange(700), 0.2)
    for start in range(0, 700, 50):
        ids = torch.arange(start, start + 50)
        neighbours, p = memory.distribution(ids, 0.2)
        width = neighbours.shape[1]
        assert torch.equal(neighbours, whole[0][ids, :width])
        assert torch.equal(p, whole[1][ids, :width])
        assert (whole[0][ids, width:] == -1).all()


def test_ids_too_large_for_packed_sorting_give_the_same_ranking() -> None:
    torch.manual_seed(7)
    lists = torch.randint(-1, 6, (40, 12), dtype=torch.int32)
    similarities = on_grid(torch.rand(40, 12))
    small = ranked_sums(lists, similarities, 4)
    far = torch.where(lists >= 0, lists + 2**30, -1)
    large = ranked_sums(far, similarities, 4)
    assert torch.equal(torch.where(large[0] >= 0, large[0] - 2**30, -1), small[0])
    assert torch.equal(large[1], small[1])


@pytest.mark.parametrize("epochs", [2, 3])
@pytest.mark.parametrize("in_progress", [True, False])
def test_a_memory_with_the_state_of_another_goes_on_alike(epochs: int, in_progress: bool) -> None:
    memory, again = filled(epochs, 40, 8, window=2, k=3), NeighborMemory(40, 8, window=2, k=3)
    halves = torch.arange(40).split(20)
    if in_progress:
        memory.observe(halves[0], torch.ones(20, 8))
    again.load_state_dict({name: tensor.clone() for name, tensor in memory.state_dict().items()})
    features = torch.randn(20, 8)
    for one in (memory, again):
        one.observe(halves[1], features)
        one.end_epoch()
    assert torch.equal(*(one.draw_partners(epochs + 1, 0.2, 3) for one in (memory, again)))
    assert all(map(torch.equal, memory.state_dict().values(), again.state_dict().values()))


def test_a_state_of_another_shape_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"cache: expected \(5, 3\), got \(5, 4\)"):
        NeighborMemory(5, 3, 1, 1).load_state_dict(NeighborMemory(5, 4, 1, 1).state_dict())


def test_an_fp16_cache_gives_the_same_lists_as_fp32_rows_rounded_to_fp16() -> None:
    torch.manual_seed(3)
    memory = NeighborMemory(50, 16, window=1, k=5, dtype=torch.float16)
    memory.observe(torch.arange(50), torch.randn(50, 16))
    queries, cache = torch.randn(6, 16), memory.cache.clone()
    expected = by_fp64(helpers.on_grid(queries), cache, 5)
    helpers.assert_same(memory.observe(torch.arange(6), queries), expected)


@pytest.mark.usefixtures("_force_int8")
def test_an_int8_copy_changes_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    lists: list[list[Tensor]] = []
    for int8_from in (1 << 40, 0):
        monkeypatch.setattr("adasim.neighbors.memory.INT8_FROM", int8_from)
        torch.manual_seed(4)
        memory = NeighborMemory(3000, 16, window=2, k=4)
        lists.append([])
        base = torch.randn(3000, 16)
        for _ in range(3):
            for ids in torch.arange(3000).split(700):
                lists[-1] += memory.observe(ids, base[ids] + 0.3 * torch.randn(len(ids), 16))
            memory.end_epoch()
        assert (memory._quantized is None) == (int8_from > 0)
    assert all(map(torch.equal, *lists))


def assert_ranked(ids: Tensor, similarities: Tensor, k: int | None) -> None:
    """`ranked_sums` adds up and ranks as whole numbers do."""
    neighbours, sums = (found.tolist() for found in ranked_sums(ids, similarities, k))
    for row, own in enumerate(ids.tolist()):
        expected: Counter[int] = Counter()
        for j, x in zip(own, similarities[row].tolist(), strict=True):
            expected[j] += round(x * 2**24)
        ranked = sorted(expected.items(), key=lambda item: (-item[1], item[0]))[:k]
        assert list(zip(neighbours[row], sums[row], strict=True))[: len(ranked)] == ranked


@given(
    window=st.one_of(st.integers(1, 8), st.integers(120, 136), st.integers(900, 1000)),
    k=st.integers(1, 4),
    high=st.booleans(),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=30, deadline=None)
def test_windows_of_any_length_are_summed_exactly(window: int, k: int, high: bool, seed: int) -> None:
    """Similarities near 1 add up to the length of the window: 128 of them pass 2^31 units of 2^-24."""
    generator = torch.Generator().manual_seed(seed)
    n = 7
    lists = torch.stack([torch.randperm(n, generator=generator)[:k] for _ in range(3 * window)])
    lists[: window // 2, 0] = n  # image 7 leads half of the first window
    similarities = torch.rand(3 * window, k, generator=generator)
    similarities = on_grid(1 - similarities * 1e-4 if high else 2 * similarities - 1)
    similarities[lists == n] = 1.0
    ids = lists.view(3, window * k).int()
    assert_ranked(ids, similarities.view(3, window * k), None)


@given(seed=st.integers(0, 2**20), width=st.integers(2, 60), spread=st.sampled_from([0, 3, 2**20]))
@settings(max_examples=60, deadline=None)
def test_the_best_are_ranked_by_all_bits_of_their_sums(seed: int, width: int, spread: int) -> None:
    """Many sums that differ in their last bits only, so that their leading bits cannot choose among them."""
    generator = torch.Generator().manual_seed(seed)
    units = 2**24 - torch.randint(spread + 1, (4, width), generator=generator)
    ids = torch.stack([torch.randperm(width, generator=generator) for _ in range(4)]).int()
    assert_ranked(ids, units.float() * 2.0**-24, 3)


def test_ids_of_any_integer_kind_are_taken() -> None:
    def said(ids: Ids) -> list[Tensor]:
        memory = NeighborMemory(3, 2, window=1, k=2)
        lists: list[Tensor] = []
        for _ in range(2):
            lists += memory.observe(ids, torch.tensor([[0.6, 0.8], [1.0, 0.0]]))
            memory.end_epoch()
        drawn = memory.draw_partners(2, 0.2, 0, ids), memory.nearest_other(ids)
        return [*lists, *memory.distribution(ids, 0.2), *drawn, *memory.state_dict().values()]

    expected = said(torch.tensor([2, 0]))
    short = torch.tensor([2, 0], dtype=torch.uint8), torch.tensor([2, 0], dtype=torch.int16)
    for ids in ([2, 0], (2, 0), np.array([2, 0]), np.array([2, 0], dtype=np.uint16), *short):
        assert all(map(torch.equal, said(ids), expected)), ids


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([0.0, 1.0], "whole numbers, got float32"),
        (torch.tensor([True, False]), "whole numbers, got bool"),
        (torch.tensor([[0, 1]]), r"one row of whole numbers, got int64 of shape \(1, 2\)"),
        (torch.tensor(1), r"shape \(\)"),
        ([0, 3], "between 0 and 2, got 3"),
        ([-1, 0], "between 0 and 2, got -1"),
    ],
)
def test_ids_that_are_not_ids_are_refused_by_every_verb(ids: Ids, words: str) -> None:
    memory = NeighborMemory(3, 2, window=1, k=2)
    before = {name: tensor.clone() for name, tensor in memory.state_dict().items()}
    for verb in (
        lambda: memory.observe(ids, torch.ones(2, 2)),
        lambda: memory.distribution(ids, 0.2),
        lambda: memory.draw_partners(0, 0.2, 0, ids),
        lambda: memory.nearest_other(ids),
    ):
        with pytest.raises(ValueError, match=words):
            verb()
    assert all(torch.equal(before[name], tensor) for name, tensor in memory.state_dict().items())


def test_an_epoch_ends_once_and_not_before_something_was_observed() -> None:
    with pytest.raises(RuntimeError, match=r"end_epoch\(\) without observe\(\)"):
        NeighborMemory(3, 2, window=2, k=2).end_epoch()
    memory = filled(1, 3, 2, window=2, k=2)
    lists = memory.history_ids.clone()
    with pytest.raises(RuntimeError, match="since epoch 1 began"):
        memory.end_epoch()
    assert memory.epochs == 1
    assert torch.equal(memory.history_ids, lists)


def test_draws_with_another_epoch_or_temperature_are_refused() -> None:
    memory = filled(1, 3, 2, window=1, k=2)
    with pytest.raises(ValueError, match="epoch=5, but this memory has finished 1 epochs"):
        memory.draw_partners(5, 0.2, 0)
    for tau in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"tau={tau} must be 0"):
            memory.draw_partners(1, tau, 0)
        with pytest.raises(ValueError, match=f"tau={tau} must be 0"):
            memory.distribution([0], tau)


def test_a_memory_describes_itself_and_moves() -> None:
    memory = NeighborMemory(1000, 8, window=5, k=3)
    assert "num_images=1000, dim=8, window=5, k=3" in repr(memory)
    assert "0 epochs finished, float32 cache on cpu" in repr(memory)
    assert memory.to("meta") is memory
    assert memory.cache.device.type == "meta"
    assert memory.history_ids.device.type == "cpu"


@pytest.mark.parametrize("wrong", [{"k": 6}, {"window": 0}, {"support": "best"}])
def test_bad_arguments_are_named(wrong: dict[str, Any]) -> None:
    (name, value), sizes = next(iter(wrong.items())), {"num_images": 5, "dim": 3, "window": 1, "k": 1}
    with pytest.raises(ValueError, match=f"{name}={value!r}"):
        NeighborMemory(**sizes | wrong)
