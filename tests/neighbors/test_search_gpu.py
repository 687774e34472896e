"""The search made for accelerators, on a pretend GPU: exact, proven, and within its budget."""

from random import Random
from typing import Any

import pytest
import torch
from accelerator import HAS_MIXED_PRODUCTS, Accelerator, accurate, hostile, truncating
from exact_search import KINDS, brute_force, by_fp64, clouds, tied
from helpers import assert_same, on_grid
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from adasim.neighbors import NeighborMemory, ShardedMemory, search, search_gpu

Pair = tuple[Tensor, Tensor]
needs_mixed_products = pytest.mark.skipif(not HAS_MIXED_PRODUCTS, reason="torch before 2.8")


def on_device(queries: Tensor, rows: Tensor, k: int) -> Pair:
    similarities, ids = search(queries.to("cuda"), rows.to("cuda"), k)
    assert similarities.device == ids.device == torch.device("cuda", 0)
    return similarities.cpu(), ids.cpu()


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles, blocks and parts, and few spare candidates, in searches that would need one of each."""
    monkeypatch.setattr(search_gpu, "_TILE_SCORES", 1 << 10)
    monkeypatch.setattr(search_gpu, "_EXACT_NUMBERS", 1 << 10)
    monkeypatch.setattr(search_gpu, "_DENSE_SCORES", 1 << 9)
    monkeypatch.setattr(search_gpu, "_MEMBERS", 1 << 12)
    monkeypatch.setattr(search_gpu, "_SPARE", (3, 20))


# ---- exact ----


@pytest.mark.parametrize(
    ("n", "dim", "b", "k"), [(1, 3, 1, 1), (65, 8, 3, 65), (64, 5, 2, 7), (700, 16, 5, 50), (1500, 24, 9, 7)]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("small_steps", "gpu")
def test_lists_on_a_device_equal_the_brute_force(n: int, dim: int, b: int, k: int, kind: str) -> None:
    rows = clouds(n, dim)[kind]
    queries = torch.cat([rows[: b // 2], on_grid(torch.randn(b - b // 2, dim))])
    for given_rows in (rows, rows.half(), 300 * rows.half()):
        assert_same(on_device(queries, given_rows, k), brute_force(queries, given_rows, k))


@needs_mixed_products
@pytest.mark.parametrize("k", [1, 2, 10, 50])
def test_lists_of_many_rows_are_exact_and_their_proof_succeeds(k: int, gpu: Accelerator) -> None:
    """20,037 rows: many more groups than are chosen, and a last one that is not full."""
    for kind, rows in clouds(20_037, 32).items():
        if kind not in ("random", "clustered", "alike"):
            continue
        rows = rows.half()
        queries = on_grid(rows[:90].float() + 0.02 * torch.randn(90, 32))
        there = queries.to("cuda"), rows.to("cuda")
        gpu.clear()
        found = search(*there, k)
        # One answer, everybody has a proof; with cosines of 0.9999 fp16 cannot give it, and fp32 does.
        assert gpu.syncs.total() == (2 if kind == "alike" else 1), kind
        assert gpu.operations["mixed_mm"] > 0
        assert_same((found[0].cpu(), found[1].cpu()), by_fp64(queries, rows, k))


@given(draw=st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_search_on_a_device_is_exact_under_ties(draw: Random) -> None:
    """Coordinates from a handful of values make ties the rule, of rows as well as of groups."""
    k, levels = draw.randint(1, 12), draw.randint(1, 4)
    queries, rows, _ = tied(draw, draw.randint(1, 5), draw.randint(1, 300), draw.randint(1, 12), levels)
    queries, rows = queries / 8, (rows / 8).to(draw.choice([torch.float16, torch.float32]))
    with Accelerator(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(search_gpu, "_SPARE", (1, 2))
        assert_same(on_device(queries, rows, k), brute_force(queries, rows, k))


@pytest.mark.usefixtures("small_steps", "gpu")
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_what_is_not_finite_is_never_returned_and_disturbs_nobody(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    rows, queries = torch.randn(500, 6).to(dtype), torch.randn(9, 6)
    rows[::5, 2], rows[6, 0], rows[7], rows[499, 1] = torch.nan, torch.inf, -torch.inf, -torch.inf
    queries[1, 0], queries[2, 5], queries[3] = torch.nan, torch.inf, 0.0
    for k in (3, 500):
        assert_same(on_device(queries, rows, k), brute_force(queries, rows, k))
    nothing = torch.full((70, 6), torch.nan, dtype=dtype)
    assert on_device(queries, nothing, 2)[1].tolist() == [[-1, -1]] * 9


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("scale", [1e-42, 1e-20, 1e15])
def test_numbers_of_any_size_are_searched(scale: float) -> None:
    torch.manual_seed(5)
    rows, queries = torch.randn(3_000, 8), torch.randn(5, 8)
    assert_same(on_device(queries * scale, rows, 4), brute_force(queries * scale, rows, 4))
    assert_same(on_device(queries, rows * scale, 4), brute_force(queries, rows * scale, 4))
    assert_same(on_device(queries * scale, rows.half(), 4), brute_force(queries * scale, rows.half(), 4))


@pytest.mark.usefixtures("gpu")
def test_no_rows_and_no_queries_on_a_device() -> None:
    assert on_device(torch.ones(2, 3), torch.ones(0, 3), 2)[1].tolist() == [[-1, -1]] * 2
    assert on_device(torch.ones(0, 3), torch.ones(5, 3), 2)[1].shape == (0, 2)


# ---- however inexact the product ----


def near_ties() -> Pair:
    """Rows that differ by less than a tensor core's sums may be off, in scores that fp16 holds exactly."""
    torch.manual_seed(0)
    rows = torch.full((3_000, 64), 0.125)
    rows[:, 0] = torch.randint(1_000, (3_000,)) * 2.0**-22
    return torch.ones(4, 64), rows.half()


@needs_mixed_products
@pytest.mark.parametrize("product", [accurate, truncating, hostile])
def test_answers_are_exact_on_tensor_cores_that_truncate(product: Any) -> None:
    alike = clouds(2_000, 24)["alike"].half()
    with Accelerator(mixed_product=product) as gpu:
        for queries, rows in ((alike[:20].float(), alike), near_ties()):
            assert_same(on_device(queries, rows, 5), by_fp64(queries, rows, 5))
        assert gpu.operations["mixed_mm"] > 0


@needs_mixed_products
def test_without_the_margin_the_answers_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    queries, rows = near_ties()
    monkeypatch.setattr(search_gpu, "error_of_products", lambda dim, dtype: 0.0)
    with Accelerator(mixed_product=hostile):
        found = on_device(queries, rows, 5)
    assert not torch.equal(found[1], by_fp64(queries, rows, 5)[1])


@needs_mixed_products
@pytest.mark.parametrize("dim", [1, 5, 64, 203])
def test_the_margin_covers_every_pair_of_truncating_tensor_cores(dim: int) -> None:
    torch.manual_seed(dim)
    rows = torch.cat([clouds(300, dim)[kind] for kind in ("random", "alike")])
    rows = torch.cat([rows, rows.abs(), 1e-6 * rows, -rows.abs()]).half()  # 1e-6: subnormal numbers
    queries = torch.cat([torch.randn(20, dim), rows[300:320].float(), torch.rand(20, dim)])
    row_norm = torch.linalg.vector_norm(rows.double(), dim=1).max()
    truth = queries.double() @ rows.double().T
    with Accelerator(mixed_product=truncating):
        tiles = search_gpu._Tiles(queries.to("cuda"), rows.to("cuda"), row_norm, torch.float16)
        scores = tiles.scores(0, -(-len(rows) // 64)).flatten(1)[:, : len(rows)].cpu()
        unit, margin = tiles.unit.cpu()[:, None], tiles.margin.cpu()[:, None]
    off = (scores - truth / unit).abs()
    assert (off <= margin).all()
    if dim >= 64:
        assert (off > 0.02 * margin).any()  # it is not idly wide: rounding alone comes this close


@pytest.mark.skipif(not hasattr(torch._C, "_set_cublas_allow_fp16_accumulation"), reason="torch before 2.7")
def test_sums_in_fp16_are_never_believed(gpu: Accelerator) -> None:
    """The program may have allowed them. There is no bound for such sums here: fp32 products take their place."""
    queries, rows = near_ties()
    torch.backends.cuda.matmul.allow_fp16_accumulation = True
    try:
        assert_same(on_device(queries, rows, 5), by_fp64(queries, rows, 5))
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = False
    assert gpu.operations["mixed_mm"] == 0
    assert gpu.operations["mm"] > 0


def test_a_torch_without_mixed_products_searches_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(a: Tensor, b: Tensor) -> Tensor:
        raise NotImplementedError("aten::mm.dtype")

    queries, rows = near_ties()
    search_gpu._mixed_product_runs.cache_clear()
    with Accelerator(mixed_product=refuses):
        found = on_device(queries, rows, 5)
    search_gpu._mixed_product_runs.cache_clear()
    assert_same(found, by_fp64(queries, rows, 5))


def test_only_queries_without_a_proof_are_searched_again(
    gpu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    rows = on_grid(torch.randn(9_000, 16))
    rows[2_000:5_000] = rows[2_000]  # the third query's neighbours: more ties than any attempt has room for
    queries = rows[torch.tensor([10, 20, 2_000, 30])]
    again: list[int] = []
    in_fp64 = search_gpu.search_in_fp64

    def counted(q: Tensor, *rest: Any) -> Pair:
        again.append(len(q))
        return in_fp64(q, *rest)

    monkeypatch.setattr(search_gpu, "search_in_fp64", counted)
    there = queries.to("cuda"), rows.half().to("cuda")
    gpu.clear()
    found = search(*there, 4)
    assert gpu.syncs.total() == 2  # who has no proof after the first attempt, and after the second
    assert again == [1]
    assert_same((found[0].cpu(), found[1].cpu()), by_fp64(queries, rows.half(), 4))


# ---- the budget ----


def filled(kind: type[NeighborMemory], rows: Tensor, k: int) -> NeighborMemory:
    """A memory on the device whose cache is `rows`, after its first epoch."""
    memory = kind(len(rows), rows.shape[1], window=2, k=k, device="cuda")
    memory.cache.copy_(rows)
    memory.epochs = 1
    return memory


@needs_mixed_products
def test_an_observation_of_1024_queries_starts_120_operations_and_waits_3_times(gpu: Accelerator) -> None:
    """160,146 rows, an eighth of ImageNet-1k. The width does not change the count but for step 4 (in parts from
    D = 900 on, see the next test), so a small one will do."""
    torch.manual_seed(0)
    rows = on_grid(torch.randn(160_146, 16))
    memory = filled(ShardedMemory, rows, 10)
    ids = torch.randperm(len(rows))[:1024]
    features = (rows[ids] + 0.1 * torch.randn(1024, 16)).to("cuda")
    there = ids.to("cuda")
    gpu.clear()
    memory.observe(there, features)
    assert gpu.operations.total() <= 120, gpu.operations
    # Ids checked; proofs; lists to main memory.
    assert gpu.syncs == {"tolist": 1, "nonzero": 1, "to the CPU": 1}
    gpu.clear()
    memory.observe(ids[:8], features[:8])  # ids from a loader are on the CPU: one less
    assert gpu.syncs.total() == 2
    gpu.clear()
    memory.end_epoch()
    memory.draw_partners(2, 0.2, 0)
    memory.nearest_other()
    assert gpu.operations.total() == gpu.syncs.total() == 0  # the history is in main memory


@needs_mixed_products
def test_the_widest_features_cost_a_few_operations_more(
    gpu: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D = 2,048 takes step 4 in 3 parts, and 160,146 rows all steps in 5 tiles: both as here, in small."""
    parts = -(-1024 * 74 * 2048 // search_gpu._EXACT_NUMBERS)
    tiles = -(-160_146 // (search_gpu._TILE_SCORES // 1024))
    monkeypatch.setattr(search_gpu, "_EXACT_NUMBERS", -(-64 // parts) * 74 * 16)
    monkeypatch.setattr(search_gpu, "_TILE_SCORES", 64 * (20_000 // tiles // 64 + 1) * 64)
    torch.manual_seed(0)
    rows = on_grid(torch.randn(20_001, 16))
    memory = filled(NeighborMemory, rows, 10)
    features = (rows[:64] + 0.1 * torch.randn(64, 16)).to("cuda")
    there = torch.arange(64).to("cuda")
    search(features, memory.cache, 1)  # whether the device has mixed products is asked once
    gpu.clear()
    memory.observe(there, features)
    assert gpu.operations["bmm"] == parts == 3
    assert gpu.operations["mixed_mm"] == 2 * tiles - 1 == 9
    assert gpu.operations.total() <= 120, gpu.operations
    assert gpu.syncs.total() <= 3


@pytest.mark.parametrize(("kind", "b"), [("empty", 64), ("identical", 1024)])
def test_a_collapsed_encoder_or_an_empty_cache_waits_once_more(kind: str, b: int, gpu: Accelerator) -> None:
    """No query has a proof: all are searched three times. That is bounded, too."""
    torch.manual_seed(0)
    rows = torch.zeros(20_001, 16) if kind == "empty" else on_grid(torch.randn(1, 16)).expand(20_001, 16)
    memory = filled(NeighborMemory, rows, 10)
    features, ids = torch.randn(b, 16).to("cuda"), torch.arange(b).to("cuda")
    gpu.clear()
    _, neighbours = memory.observe(ids, features)
    syncs, operations = gpu.syncs.copy(), gpu.operations.copy()
    assert neighbours.cpu().tolist() == [list(range(10))] * b
    assert syncs.total() <= 4, syncs
    assert operations.total() <= 500, operations
