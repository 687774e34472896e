"""`search` on a CPU against a brute force from its definition: fp64 scores rounded to fp32, ties to smaller ids."""

from contextlib import suppress
from random import Random

import pytest
import torch
from exact_search import KINDS, brute_force, by_fp64, clouds, tied
from helpers import assert_same, on_grid
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adasim.neighbors import QuantizedRows, merge, search
from adasim.neighbors.search import (
    FloatProduct,
    Int8Product,
    TooManyCandidatesError,
    candidates,
    search_by,
)


def float_product(queries: Tensor, rows: Tensor) -> FloatProduct:
    return FloatProduct(queries, rows, float(rows.norm(dim=1).max()) * 1.001)


def products(queries: Tensor, rows: Tensor) -> list[FloatProduct | Int8Product]:
    return [Int8Product(queries, QuantizedRows(rows)), float_product(queries, rows)]


@pytest.mark.usefixtures("_force_int8")
@pytest.mark.parametrize(
    ("n", "dim", "b", "k"),
    [(1, 3, 1, 1), (65, 8, 3, 65), (700, 16, 5, 10), (3000, 24, 9, 7), (3000, 24, 9, 200)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_search_equals_the_brute_force_with_any_product_in_any_tiles(
    n: int, dim: int, b: int, k: int, kind: str
) -> None:
    rows = clouds(n, dim)[kind]
    queries = torch.cat([rows[: b // 2], on_grid(torch.randn(b - b // 2, dim))])
    expected = brute_force(queries, rows, k)
    assert_same(search(queries, rows, k), expected)
    assert_same(search(queries, rows, k, quantized=QuantizedRows(rows)), expected)
    for product in products(queries, rows):
        with suppress(TooManyCandidatesError):  # a product may give up, never be wrong
            assert_same(search_by(product, queries, rows, k, tile=256), expected)
    assert_same(search(queries, rows.half(), k), brute_force(queries, rows.half(), k))


@pytest.mark.usefixtures("_force_int8")
@given(draw=st.randoms(use_true_random=False))
@settings(max_examples=120, deadline=None)
def test_search_is_exact_under_ties(draw: Random) -> None:
    """With few levels nearly all is tied; then some rows hold a NaN or Inf."""
    k, levels = draw.randint(1, 40), draw.choice([1, 3, 1000])
    tile, bad = draw.choice([64, 256, 1024]), draw.randint(0, 5)
    queries, rows, generator = tied(
        draw, draw.randint(1, 6), draw.randint(1, 700), draw.randint(1, 20), levels
    )
    n, dim = rows.shape
    rows, queries = (x.div(levels * dim).mul(2**24).round() / 2**24 for x in (rows, queries))
    expected = brute_force(queries, rows, k)
    assert_same(search(queries, rows, k, quantized=QuantizedRows(rows)), expected)
    for product in products(queries, rows) if dim > 1 else ():
        with suppress(TooManyCandidatesError):
            assert_same(search_by(product, queries, rows, k, tile), expected)
    broken = torch.randint(n, (bad,), generator=generator)
    rows[broken, 0] = torch.tensor([torch.nan, torch.inf, -torch.inf])[broken % 3]
    expected = brute_force(queries, rows, k)
    assert_same(search(queries, rows, k), expected)


@pytest.mark.usefixtures("_force_int8")
def test_many_tiles_and_both_products_agree_on_a_large_cloud() -> None:
    torch.manual_seed(0)
    rows = on_grid(torch.randn(60_000, 48))
    queries = on_grid(rows[:160] + 0.3 * torch.randn(160, 48))  # 9.6 million scores: more than one tile
    expected = by_fp64(queries, rows, 10)
    quantized = QuantizedRows(rows)
    assert_same(search(queries, rows, 10), expected)
    assert_same(search(queries, rows, 10, quantized=quantized), expected)
    _, ids, _ = candidates(Int8Product(queries, quantized), len(rows), 10, 16_384)
    assert 160 * 10 <= len(ids) < 160 * 2000  # the bound did prune


@pytest.mark.parametrize("n", [2_000, 4_096, 9_001])
@pytest.mark.parametrize("k", [1, 10, 50, 200])
def test_features_of_an_encoder_never_need_more_than_fp32(n: int, k: int) -> None:
    """Clustered and positive: fp32 prunes, at sizes on and off the groups' edges."""
    generator = torch.Generator().manual_seed(n)
    centres = torch.randn(40, 32, generator=generator)
    noise = torch.randn(n, 32, generator=generator)
    rows = on_grid((centres[torch.arange(n) % 40] + 0.7 * noise + 0.3).relu())
    lists = search_by(float_product(rows[:24], rows), rows[:24], rows, k)
    assert_same(lists, by_fp64(rows[:24], rows, k))


def test_a_product_gives_up_where_rows_are_alike_and_search_is_still_exact() -> None:
    rows = on_grid(torch.randn(1, 16) + 1e-6 * torch.randn(3_000, 16))
    queries = torch.cat([rows[:5], torch.zeros(1, 16)])
    for product in products(queries, rows):
        with pytest.raises(TooManyCandidatesError):
            search_by(product, queries, rows, 4, tile=1024)
    assert_same(search(queries, rows, 4), by_fp64(queries, rows, 4))


def test_the_int8_error_bound_holds_for_every_pair() -> None:
    torch.manual_seed(1)
    for kind, rows in clouds(400, 20).items():
        rows = rows * torch.rand(400, 1) * 3
        rows[7, 3] = 9.0  # an outlier that will be clipped
        quantized = QuantizedRows(rows)
        queries = torch.randn(30, 20)
        product = Int8Product(queries, quantized)
        truth = queries.double() @ (rows - quantized.mean)[quantized.order].double().T
        off = (product.scores(0, 400, 400) * product.unit - truth).abs()
        assert (off <= product.margins(0, 400, 1)).all(), kind
        pairs = torch.arange(30).repeat_interleave(400), torch.arange(400).repeat(30)
        assert torch.equal(product.margins_of(*pairs).view(30, 400), product.margins(0, 400, 1))


@pytest.mark.usefixtures("_force_int8")
def test_a_failed_int8_search_rests_before_it_is_tried_again() -> None:
    quantized = QuantizedRows(torch.eye(4))
    assert quantized.worth_trying()
    quantized.pause = 31
    assert 1 <= sum(quantized.worth_trying() for _ in range(40)) < 10


def test_rows_that_are_not_finite_are_never_returned() -> None:
    torch.manual_seed(3)
    rows, queries = torch.randn(200, 6), torch.randn(8, 6)
    rows[5, 2], rows[6, 0], rows[199, 1] = torch.nan, torch.inf, -torch.inf
    everything = search(queries, rows, 200)
    assert_same(everything, brute_force(queries, rows, 200))
    assert not torch.isin(everything[1], torch.tensor([5, 6, 199])).any()
    queries[1, 0] = torch.nan  # such a query gets padding, and disturbs no other
    assert_same(search(queries, rows, 2), brute_force(queries, rows, 2))


def test_fewer_rows_than_k_no_rows_and_no_queries() -> None:
    similarities, ids = search(torch.ones(2, 3), torch.ones(1, 3), 3)
    assert ids.tolist() == [[0, -1, -1]] * 2
    assert similarities[0].tolist() == [3.0, -torch.inf, -torch.inf]
    assert search(torch.ones(2, 3), torch.ones(0, 3), 2)[1].tolist() == [[-1, -1]] * 2
    assert search(torch.ones(0, 3), torch.ones(5, 3), 2)[1].shape == (0, 2)


def test_more_queries_than_one_block() -> None:
    torch.manual_seed(4)
    rows, queries = on_grid(torch.randn(50, 5)), on_grid(torch.randn(1100, 5))
    assert_same(search(queries, rows, 3), by_fp64(queries, rows, 3))


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
        search(torch.ones(2, 3), torch.ones(5, 4), 1)
    with pytest.raises(ValueError, match="k=0"):
        search(torch.ones(2, 3), torch.ones(5, 3), 0)


# ---- buffers that are kept from search to search ----


def test_a_search_in_inference_mode_leaves_memory_that_others_can_use() -> None:
    rows = on_grid(torch.randn(500, 8))
    with torch.inference_mode():
        first = search(rows[:3], rows, 4)
    assert_same(search(rows[:3], rows, 4), first)
    rows.requires_grad_()
    assert_same(search(rows[:3], rows, 4), first)
