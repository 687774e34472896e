"""The search of a small memory against a brute force, engine by engine, and the memory it keeps."""

import threading
from contextlib import suppress

import pytest
import torch
from helpers import assert_same, on_grid
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adasim.neighbors import NeighborMemory, QuantizedRows, search
from adasim.neighbors.one_tile import search_one_tile
from adasim.neighbors.scan import FloatScorer, Int8Scorer, Scorer, TooManyCandidatesError
from adasim.neighbors.workspace import workspace

Pair = tuple[Tensor, Tensor]


def brute_force(queries: Tensor, rows: Tensor, k: int) -> Pair:
    """fp64 scores rounded to fp32; score descending, then id ascending; rows that are not finite left out."""
    scores = (queries.double()[:, None] * rows.double()).sum(2).float() + 0.0  # (B, N)
    scores[:, ~torch.isfinite(rows).all(1)] = -torch.inf
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    best = scores.gather(1, order)
    missing = k - order.shape[1]
    best = torch.nn.functional.pad(best, (0, missing), value=-torch.inf)
    order = torch.nn.functional.pad(order, (0, missing), value=-1)
    return best, torch.where(torch.isfinite(best), order, -1)


@given(
    n=st.integers(1, 700),
    dim=st.integers(2, 20),
    b=st.integers(1, 6),
    k=st.integers(1, 40),
    levels=st.sampled_from([1, 3, 1000]),
    bad=st.integers(0, 5),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=120, deadline=None)
def test_both_engines_of_one_tile_equal_the_brute_force(
    n: int, dim: int, b: int, k: int, levels: int, bad: int, seed: int
) -> None:
    """With few levels nearly all is tied; some rows hold a NaN or Inf. An engine may give up, never be wrong."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-levels, levels + 1, (n, dim), generator=generator) / (levels * dim)
    queries = torch.randint(-levels, levels + 1, (b, dim), generator=generator) / (levels * dim)
    rows, queries = rows.mul(2**24).round() / 2**24, queries.mul(2**24).round() / 2**24
    engines: list[Scorer] = [Int8Scorer(queries, QuantizedRows(rows)), FloatScorer(queries, rows, None)]
    expected = brute_force(queries, rows, k)
    for scorer in engines:
        with suppress(TooManyCandidatesError):
            assert_same(search_one_tile(queries, rows, k, scorer), expected)
    broken = torch.randint(n, (bad,), generator=generator)
    rows[broken, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])[broken % 3]
    expected = brute_force(queries, rows, k)
    assert_same(search(queries, rows, k), expected)
    with suppress(TooManyCandidatesError):
        assert_same(search_one_tile(queries, rows, k, FloatScorer(queries, rows, None)), expected)


@pytest.mark.parametrize("n", [2_000, 4_096, 9_001])
@pytest.mark.parametrize("k", [1, 10, 50])
def test_features_of_an_encoder_never_need_more_than_one_engine(n: int, k: int) -> None:
    """Clustered and positive: fp32 prunes, at sizes on and off the groups' edges."""
    generator = torch.Generator().manual_seed(n)
    centres = torch.randn(40, 32, generator=generator)
    noise = torch.randn(n, 32, generator=generator)
    rows = on_grid((centres[torch.arange(n) % 40] + 0.7 * noise + 0.3).relu())
    queries = rows[:24]
    found = search_one_tile(queries, rows, k, FloatScorer(queries, rows, None))
    assert_same(found, brute_force(queries, rows, k))


def test_one_tile_gives_up_where_rows_are_alike_and_search_is_still_exact() -> None:
    rows = on_grid(torch.randn(1, 16) + 1e-6 * torch.randn(3_000, 16))
    queries = torch.cat([rows[:5], torch.zeros(1, 16)])
    with pytest.raises(TooManyCandidatesError):
        search_one_tile(queries, rows, 4, FloatScorer(queries, rows, None))
    assert_same(search(queries, rows, 4), brute_force(queries, rows, 4))


def test_a_search_in_inference_mode_leaves_memory_that_others_can_use() -> None:
    rows = on_grid(torch.randn(500, 8))
    workspace.kept.clear()
    with torch.inference_mode():
        first = search(rows[:3], rows, 4)
    assert_same(search(rows[:3], rows, 4), first)
    rows.requires_grad_()
    assert_same(search(rows[:3], rows, 4), first)


def test_searches_of_two_threads_do_not_share_memory() -> None:
    torch.manual_seed(0)
    clouds = [on_grid(torch.randn(4_000, 24)) for _ in range(2)]
    expected = [search(rows[:64], rows, 5) for rows in clouds]
    wrong: list[int] = []

    def run(which: int) -> None:
        rows = clouds[which]
        for _ in range(20):
            found = search(rows[:64], rows, 5)
            if not (torch.equal(found[0], expected[which][0]) and torch.equal(found[1], expected[which][1])):
                wrong.append(which)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_was_found_stays_when_the_next_search_uses_the_same_memory() -> None:
    rows = on_grid(torch.randn(900, 8))
    found = search(rows[:6], rows, 3)
    kept = found[0].clone(), found[1].clone()
    search(rows[6:12], rows.flip(0).contiguous(), 3)
    assert_same(found, kept)


@pytest.mark.parametrize("ids", [[4, 1, 7], [4, 1, 4], [0, 9, 3]])
def test_a_batch_with_and_without_repeats_writes_the_last_of_each(ids: list[int]) -> None:
    memory = NeighborMemory(10, 4, window=1, k=2)
    features = torch.randn(3, 4)
    memory.observe(ids, features)
    for i in range(10):
        at = [place for place, given in enumerate(ids) if given == i]
        row = on_grid(features[at[-1:]])[0] if at else torch.zeros(4)
        assert torch.equal(memory.cache[i], row)
