"""The sharded memory, in real processes, against the memory of one process: equal bit for bit."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from adasim.dist.collectives import Exchange
from adasim.neighbors import NeighborMemory, ShardedMemory
from adasim.neighbors import memory as memory_module

WORLDS = (1, 2, 4, 1)  # a run that is stopped three times, each time resumed by another number of processes


@dataclass
class Case:
    """Epochs of uneven batches with everything that could betray how the rows are split."""

    n: int
    k: int
    support: Literal["topk", "union"] = "topk"
    timing: Literal["previous", "current"] = "previous"
    dtype: torch.dtype = torch.float32
    int8: bool = False
    dim: int = 6
    window: int = 2

    def batches(self) -> list[tuple[int, Tensor, Tensor]]:
        """(epoch, ids, features): ties, ids twice in a batch, unvisited images, features that are not finite."""
        generator = torch.Generator().manual_seed(self.n)
        base = torch.randn(self.n, self.dim, generator=generator)
        base = torch.cat([base[: self.n // 2], base])[: self.n]  # every image has a twin in the other half
        found = []
        for epoch in range(5):
            visited = torch.randperm(self.n, generator=generator)[: max(1, self.n - 2)]
            for ids in visited.split(max(2, self.n // 3)):
                ids = torch.cat([ids, ids[:1]])
                features = base[ids] + 0.3 * torch.randn(len(ids), self.dim, generator=generator)
                if epoch % 2:
                    features = features.sign()
                if epoch == 3:
                    features[-1, 0] = torch.nan  # the later place of an image that stands twice
                found.append((epoch, ids, features))
        return found

    def make(self, kind: type[NeighborMemory]) -> NeighborMemory:
        options: Any = {"support": self.support, "timing": self.timing, "dtype": self.dtype}
        return kind(self.n, self.dim, self.window, self.k, **options)


CASES = [
    Case(37, 5),
    Case(37, 5, support="union", timing="current"),
    Case(7, 5, timing="current"),  # a quarter of the rows is fewer than K
    Case(3, 2),  # one of four ranks holds nothing
    Case(41, 4, dtype=torch.float16),
    Case(600, 4, int8=True, dim=16),
]
names = [f"{c.n}-{c.support}-{c.timing}-{c.dtype}".replace("torch.", "") for c in CASES]


def live(memory: NeighborMemory, case: Case, start: int, stop: int, rank: int, world: int) -> list[Any]:
    """Observe batches start..stop, and note all that the memory says about this rank's images."""
    notes: list[Any] = []
    batches = case.batches()
    everyone = torch.arange(case.n)
    for number in range(start, min(stop, len(batches))):
        epoch, ids, features = batches[number]
        first = number == 0 or batches[number - 1][0] != epoch
        if first and case.timing == "previous":
            notes.append(("partners", memory.draw_partners(epoch, 0.2, 1)))
            notes.append(("nearest", memory.nearest_other()))
        mine = torch.arange(len(ids)).tensor_split(world)[rank]
        notes.append(("observed", *memory.observe(ids[mine], features[mine])))
        if case.timing == "current":
            notes.append(("partners of", memory.draw_partners(epoch, 0.2, 1, ids[mine])))
            notes.append(("nearest of", memory.nearest_other(ids[mine])))
            notes.append(("features of", memory.features(case.n - 1 - ids[mine])))
        if number + 1 == len(batches) or batches[number + 1][0] != epoch:
            memory.end_epoch()
            notes.append(("distribution", *memory.distribution(everyone.tensor_split(world)[rank], 0.2)))
    return notes


def cut(case: Case, stage: int) -> int:
    """Where stage `stage` of the stopped run begins, in batches; the cuts lie inside epochs."""
    return stage * len(case.batches()) // len(WORLDS)


def work(folder: Path, stage: int) -> dict[str, Any]:
    """On every rank: each case from beginning to end, and this stage's section of each stopped run."""
    rank, world = dist.get_rank(), dist.get_world_size()
    notes: dict[str, Any] = {"whole": [], "section": [], "held": [], "states": []}
    sys.modules["adasim.neighbors.search"].int8_is_faster = lambda dim: dim > 1  # type: ignore[attr-defined]
    for number, case in enumerate(CASES):
        memory_module.INT8_FROM = 0 if case.int8 else 1 << 40
        memory = case.make(ShardedMemory)
        notes["whole"].append(live(memory, case, 0, 1000, rank, world))
        notes["held"].append((memory.rows, memory.cache.shape[0], memory.history_ids.shape[0]))
        notes["states"].append(memory.state_dict())

        resumed = case.make(ShardedMemory)
        if stage:
            before = [folder / f"{number}-{stage - 1}-{r}.state" for r in range(WORLDS[stage - 1])]
            resumed.load_parts(torch.load(file, weights_only=False) for file in before)
        notes["section"].append(live(resumed, case, cut(case, stage), cut(case, stage + 1), rank, world))
        torch.save((resumed.rows.start, resumed.state_dict()), folder / f"{number}-{stage}-{rank}.state")
    return notes


@pytest.fixture(scope="module")
def stages(run_ranks: Callable[..., list[list[Any]]]) -> list[list[Any]]:
    return run_ranks(__file__, "work", *WORLDS)


def assert_same_notes(found: list[list[Any]], expected: list[Any]) -> None:
    """All ranks' notes against those of one process."""
    assert all(len(notes) == len(expected) for notes in found)
    for expected_note, *parts in zip(expected, *found, strict=True):
        name, *tensors = expected_note
        assert all(part[0] == name for part in parts)
        for i, tensor in enumerate(tensors, start=1):
            if name in ("partners", "nearest"):  # every rank has all of them
                assert all(torch.equal(part[i], tensor) for part in parts)
                continue
            whole = torch.cat([part[i] for part in parts])
            assert whole.dtype == tensor.dtype
            if name == "distribution":  # padding may be wider: the widest union of all ranks' images
                padding = whole[:, tensor.shape[1] :]
                assert ((padding == -1) | (padding == 0)).all()
                whole = whole[:, : tensor.shape[1]]
            assert torch.equal(whole, tensor), name


@pytest.mark.parametrize("number", range(len(CASES)), ids=names)
def test_any_number_of_processes_gives_the_same_bits(stages: list[list[Any]], number: int) -> None:
    alone = CASES[number].make(NeighborMemory)
    expected = live(alone, CASES[number], 0, 1000, 0, 1)
    for ranks in stages:
        assert_same_notes([notes["whole"][number] for notes in ranks], expected)
        for name, tensor in alone.state_dict().items():
            shares = [notes["states"][number][name] for notes in ranks]
            whole = torch.cat(shares) if tensor.ndim else shares[0]
            assert torch.equal(whole, tensor), name


@pytest.mark.parametrize("number", range(len(CASES)), ids=names)
def test_a_run_resumed_by_other_numbers_of_processes_goes_on_alike(
    stages: list[list[Any]], number: int
) -> None:
    case = CASES[number]
    memory = case.make(NeighborMemory)
    for stage, ranks in enumerate(stages):
        expected = live(memory, case, cut(case, stage), cut(case, stage + 1), 0, 1)
        assert_same_notes([notes["section"][number] for notes in ranks], expected)


def test_a_rank_holds_its_share_and_no_more(stages: list[list[Any]]) -> None:
    for ranks in stages:
        for number, case in enumerate(CASES):
            held = [notes["held"][number] for notes in ranks]
            assert [i for rows, _, _ in held for i in rows] == list(range(case.n))
            for rows, cache, history in held:
                assert cache == history == len(rows)
            assert max(len(rows) for rows, _, _ in held) - min(len(rows) for rows, _, _ in held) <= 1


def test_the_cases_tell_partners_from_images() -> None:
    """Where no partner was ever drawn, equality would prove little."""
    for case in CASES:
        notes = live(case.make(NeighborMemory), case, 0, 1000, 0, 1)
        drawn = [note[1] for note in notes if note[0].startswith("partners")]
        ids = [ids for _, ids, _ in case.batches()]
        if case.timing == "previous":
            ids = [torch.arange(case.n)] * len(drawn)
        assert any(not torch.equal(a, b) for a, b in zip(drawn, ids, strict=True))


def test_without_torch_distributed_it_is_the_whole_memory() -> None:
    case = CASES[0]
    expected = live(case.make(NeighborMemory), case, 0, 1000, 0, 1)
    assert_same_notes([live(case.make(ShardedMemory), case, 0, 1000, 0, 1)], expected)


def test_an_observation_that_is_not_finished_changes_nothing() -> None:
    memory = ShardedMemory(3, 2, window=1, k=2)
    finish = memory.observe_async(torch.tensor([1]), torch.tensor([[3.0, 4.0]]))
    assert not memory.cache.any()
    assert (memory.current_ids == -1).all()
    finish()
    assert memory.cache[1].tolist() == pytest.approx([0.6, 0.8])


def test_rows_that_no_part_holds_are_named() -> None:
    parts = [NeighborMemory(9, 2, 1, 1, rows=rows) for rows in (range(0, 4), range(5, 9))]
    with pytest.raises(ValueError, match="image 4"):
        NeighborMemory(9, 2, 1, 1).load_parts((part.rows.start, part.state_dict()) for part in parts)
    with pytest.raises(ValueError, match=r"cache: expected rows of \(2,\), got \(3,\)"):
        NeighborMemory(9, 2, 1, 1).load_parts([(0, NeighborMemory(9, 3, 1, 1).state_dict())])


def test_epoch_lists_are_put_together_from_any_shards() -> None:
    torch.manual_seed(0)
    whole = NeighborMemory(10, 3, window=2, k=2)
    for _ in range(3):
        whole.observe(torch.arange(10), torch.randn(10, 3))
        whole.end_epoch()
    part = NeighborMemory(10, 3, window=2, k=2, rows=range(3, 8))
    for epoch in (1, 2):
        lists = whole.epoch_lists(epoch)
        for rows in (slice(0, 4), slice(4, 10)):
            part.load_epoch_lists(epoch, {name: x[rows] for name, x in lists.items()}, first=rows.start)
    assert torch.equal(part.history_ids, whole.history_ids[3:8])
    assert torch.equal(part.history_similarities, whole.history_similarities[3:8])


@pytest.mark.skipif(torch.accelerator.is_available(), reason="the group is then the accelerator's")
def test_a_group_that_was_made_without_a_backend_will_do() -> None:
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert Exchange().gather(torch.arange(3)).tolist() == [0, 1, 2]
    finally:
        dist.destroy_process_group()
