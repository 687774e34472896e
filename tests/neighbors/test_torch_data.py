"""Pairs through a DataLoader: partners reach its workers in every epoch, also workers that persist."""

import pytest
import torch
from torch.utils.data import DataLoader

from adasim.neighbors import NeighborMemory, PairDataset, PairSampler
from adasim.util.seeding import permutation

N = 24


def unchanged(image: int) -> int:
    return image


def doubled(image: int) -> int:
    return 2 * image


def bootstrapping_memory() -> tuple[NeighborMemory, torch.Tensor]:
    """Twelve pairs of images that lie close together, so that most draw their twin now and then."""
    features = torch.randn(N // 2, 6, generator=torch.Generator().manual_seed(0)).repeat_interleave(2, 0)
    features += 0.01 * torch.randn(N, 6, generator=torch.Generator().manual_seed(1))
    return NeighborMemory(N, 6, window=1, k=2), features


@pytest.mark.parametrize("workers", [0, 2])
def test_new_partners_reach_persistent_workers(workers: int) -> None:
    memory, features = bootstrapping_memory()
    loader = DataLoader(
        PairDataset(list(range(N)), unchanged, doubled),  # an image that is its own id shows whose it is
        batch_size=8,
        sampler=PairSampler(memory, tau=0.2, seed=3),
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    assert len(loader) == N // 8
    seen = []
    for epoch in range(4):
        partners = memory.draw_partners(epoch, 0.2, 3)
        order = []
        for ids, view_1, view_2 in loader:
            assert torch.equal(view_1, ids)
            assert torch.equal(view_2, 2 * partners[ids])
            memory.observe(ids, features[ids])
            order.append(ids)
        memory.end_epoch()
        seen.append((torch.cat(order), partners))
        assert torch.equal(torch.cat(order), permutation(3, "order", epoch, N))
    orders, drawn = zip(*seen, strict=True)
    assert not torch.equal(orders[0], orders[1])
    assert torch.equal(drawn[0], torch.arange(N))
    assert not torch.equal(drawn[2], torch.arange(N))
    assert not torch.equal(drawn[2], drawn[3])


def test_processes_share_an_epoch_without_overlap() -> None:
    memory, _ = bootstrapping_memory()
    parts = [list(PairSampler(memory, 0.2, rank=rank, world=5)) for rank in range(5)]
    assert [len(part) for part in parts] == [N // 5] * 5
    assert len({i for part in parts for i, _ in part}) == 5 * (N // 5)
    with pytest.raises(ValueError, match="rank=2 must be at least 0 and below world=2"):
        PairSampler(memory, 0.2, rank=2, world=2)


def test_an_image_with_a_label_is_unpacked_and_read_once_for_a_standard_pair() -> None:
    reads = []

    class Labelled:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, i: int) -> tuple[int, str]:
            reads.append(i)
            return 10 * i, "label"

    pairs = PairDataset(Labelled(), unchanged)
    assert pairs[1, 1] == (1, 10, 10)
    assert pairs[1, 2] == (1, 10, 20)
    assert reads == [1, 1, 2]
    with pytest.raises(TypeError, match="Give a PairSampler"):
        pairs[1]  # type: ignore[index]
