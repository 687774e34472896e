"""`search` against a brute force from its definition: fp64 scores rounded to fp32, ties to smaller ids."""

import importlib

import pytest
import torch
from exact_search import brute_force, clouds
from helpers import assert_same, on_grid
from hypothesis import given, settings
from hypothesis import strategies as st

from adasim.neighbors import QuantizedRows, merge, search
from adasim.neighbors import search as search_function
from adasim.neighbors.scan import Int8Scorer, TooManyCandidatesError, scan


@pytest.mark.usefixtures("_force_int8")
@pytest.mark.parametrize(
    ("n", "dim", "b", "k"), [(1, 3, 1, 1), (65, 8, 3, 65), (700, 16, 5, 10), (3000, 24, 9, 7)]
)
@pytest.mark.parametrize(
    "kind", ["random", "clustered", "alike", "duplicated", "half empty", "identical", "empty"]
)
def test_both_engines_equal_the_brute_force(n: int, dim: int, b: int, k: int, kind: str) -> None:
    rows = clouds(n, dim)[kind]
    queries = torch.cat([rows[: b // 2], on_grid(torch.randn(b - b // 2, dim))])
    expected = brute_force(queries, rows, k)
    assert_same(search(queries, rows, k), expected)
    assert_same(search(queries, rows, k, quantized=QuantizedRows(rows)), expected)
    assert_same(search(queries, rows.half().float(), k), brute_force(queries, rows.half(), k))
    assert_same(search(queries, rows.half(), k), brute_force(queries, rows.half(), k))


@pytest.fixture
def _many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 256 rows, as memories of more than 2^23 scores a batch are searched."""
    engine = importlib.import_module("adasim.neighbors.search")
    monkeypatch.setattr(engine, "_ONE_TILE", 0)
    monkeypatch.setattr(engine, "_TILE_SCORES", 256 * 64)  # for at most 64 queries


@pytest.mark.usefixtures("_force_int8", "_many_tiles")
@pytest.mark.parametrize(
    ("n", "dim", "b", "k"), [(65, 8, 3, 65), (700, 16, 5, 10), (3000, 24, 9, 7), (3000, 24, 9, 40)]
)
@pytest.mark.parametrize(
    "kind", ["random", "clustered", "alike", "duplicated", "half empty", "identical", "empty"]
)
def test_a_scan_of_several_tiles_equals_the_brute_force(n: int, dim: int, b: int, k: int, kind: str) -> None:
    rows = clouds(n, dim)[kind]
    queries = torch.cat([rows[: b // 2], on_grid(torch.randn(b - b // 2, dim))])
    expected = brute_force(queries, rows, k)
    assert_same(search(queries, rows, k), expected)
    assert_same(search(queries, rows, k, quantized=QuantizedRows(rows)), expected)
    rows = rows.clone()
    rows[n // 2, 0] = torch.nan
    assert_same(search(queries, rows, k), brute_force(queries, rows, k))


@pytest.mark.usefixtures("_force_int8")
@given(
    n=st.integers(1, 300),
    dim=st.integers(1, 12),
    b=st.integers(1, 5),
    k=st.integers(1, 12),
    levels=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_search_is_exact_under_ties(n: int, dim: int, b: int, k: int, levels: int, seed: int) -> None:
    """Coordinates from a handful of values make ties the rule."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(-levels, levels + 1, (n, dim), generator=generator) / 8
    queries = torch.randint(-levels, levels + 1, (b, dim), generator=generator) / 8
    expected = brute_force(queries, rows, k)
    assert_same(search(queries, rows, k), expected)
    assert_same(search(queries, rows, k, quantized=QuantizedRows(rows)), expected)


@pytest.mark.usefixtures("_force_int8")
def test_many_tiles_and_both_engines_agree_on_a_large_cloud() -> None:
    torch.manual_seed(0)
    rows = on_grid(torch.randn(60_000, 48))
    queries = on_grid(rows[:160] + 0.3 * torch.randn(160, 48))  # 9.6 million scores: more than one tile
    scores = (queries.double() @ rows.double().T).float()  # exact on the grid
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :10]
    expected = scores.gather(1, order), order
    quantized = QuantizedRows(rows)
    assert_same(search(queries, rows, 10), expected)
    assert_same(search(queries, rows, 10, quantized=quantized), expected)
    candidates = scan(Int8Scorer(queries, quantized), len(rows), 10, 16_384)
    assert 160 * 10 <= len(candidates.ids) < 160 * 2000  # the bound did prune


def test_the_int8_error_bound_holds_for_every_pair() -> None:
    torch.manual_seed(1)
    for kind, rows in clouds(400, 20).items():
        rows = rows * torch.rand(400, 1) * 3
        rows[7, 3] = 9.0  # an outlier that will be clipped
        quantized = QuantizedRows(rows)
        queries = torch.randn(30, 20)
        scorer = Int8Scorer(queries, quantized)
        truth = queries.double() @ (rows - quantized.mean).double().T
        off = (scorer.scores(0, 400) * scorer.unit - truth).abs()
        b, i = torch.arange(30)[:, None], torch.arange(400)[None]
        assert (off <= scorer.margins(b, i)).all(), kind


def test_the_int8_scan_gives_up_when_it_cannot_prune() -> None:
    rows = clouds(20_000, 16)["identical"]
    with pytest.raises(TooManyCandidatesError):
        scan(Int8Scorer(rows[:4], QuantizedRows(rows)), len(rows), 5, 4096)


def test_a_failed_int8_scan_rests_before_it_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adasim.neighbors.quantized.int8_is_faster", lambda device, dim: True)
    quantized = QuantizedRows(torch.eye(4))
    assert quantized.worth_trying()
    quantized.failed()
    tries = [quantized.worth_trying() for _ in range(40)]
    assert 1 <= sum(tries) < 10


@pytest.mark.usefixtures("_force_int8")
def test_writing_rows_keeps_the_int8_copy_in_step() -> None:
    torch.manual_seed(2)
    rows = on_grid(torch.randn(500, 12))
    quantized = QuantizedRows(rows)
    ids = torch.tensor([3, 77, 401])
    rows[ids] = on_grid(torch.randn(3, 12))
    quantized.write(ids, rows[ids])
    assert_same(search(rows[:50], rows, 4, quantized=quantized), brute_force(rows[:50], rows, 4))


def test_rows_that_are_not_finite_are_never_returned() -> None:
    torch.manual_seed(3)
    rows = torch.randn(200, 6)
    rows[5, 2], rows[6, 0], rows[199, 1] = torch.nan, torch.inf, -torch.inf
    queries = torch.randn(8, 6)
    assert_same(search(queries, rows, 200), brute_force(queries, rows, 200))
    everything = search(queries, rows, 200)[1]
    assert not torch.isin(everything, torch.tensor([5, 6, 199])).any()


def test_a_query_that_is_not_finite_gets_padding_and_disturbs_no_other() -> None:
    rows, queries = torch.randn(20, 4), torch.randn(3, 4)
    queries[1, 0] = torch.nan
    assert_same(search(queries, rows, 2), brute_force(queries, rows, 2))


def test_fewer_rows_than_k_no_rows_and_no_queries() -> None:
    similarities, ids = search(torch.ones(2, 3), torch.ones(1, 3), 3)
    assert ids.tolist() == [[0, -1, -1]] * 2
    assert similarities[0].tolist() == [3.0, -torch.inf, -torch.inf]
    assert search(torch.ones(2, 3), torch.ones(0, 3), 2)[1].tolist() == [[-1, -1]] * 2
    assert search(torch.ones(0, 3), torch.ones(5, 3), 2)[1].shape == (0, 2)


def test_more_queries_than_one_block() -> None:
    torch.manual_seed(4)
    rows = on_grid(torch.randn(50, 5))
    queries = on_grid(torch.randn(1100, 5))
    assert_same(search(queries, rows, 3), brute_force(queries, rows, 3))


def test_merging_parts_equals_searching_the_whole() -> None:
    torch.manual_seed(5)
    rows = (torch.randn(90, 4) * 2).round() / 4  # many ties
    queries = (torch.randn(7, 4) * 2).round() / 4
    parts = [search(queries, rows[a : a + 30], 6) for a in (60, 0, 30)]
    similarities = torch.cat([s for s, _ in parts], 1)
    ids = torch.cat([i + a for (_, i), a in zip(parts, (60, 0, 30), strict=True)], 1)
    assert_same(merge(similarities, ids, 6), search(queries, rows, 6))


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(5, 4\)"):
        search_function(torch.ones(2, 3), torch.ones(5, 4), 1)
    with pytest.raises(ValueError, match="k=0"):
        search(torch.ones(2, 3), torch.ones(5, 3), 0)
