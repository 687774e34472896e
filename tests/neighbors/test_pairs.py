import pytest
import torch

from adasim.neighbors import Nearest, NeighborMemory, Oracle
from adasim.util.errors import UserError


def test_nearest_takes_the_best_other_image_of_the_last_epoch() -> None:
    memory = NeighborMemory(4, 2, window=1, k=3)
    policy = Nearest(memory)
    assert torch.equal(policy.partners(0), torch.arange(4))
    memory.epochs = 1
    memory.history_ids[:, 0] = torch.tensor([[0, 2, 3], [3, 1, 0], [2, -1, -1], [-1, -1, -1]])
    assert policy.partners(1).tolist() == [2, 3, 2, 3]


def test_nearest_reads_the_newest_list_of_a_window_and_of_the_epoch_in_progress() -> None:
    memory = NeighborMemory(3, 2, window=2, k=2, timing="current")
    memory.history_ids[:] = torch.tensor([[[0, 1], [0, 2]], [[1, 0], [1, 2]], [[2, 0], [2, 1]]])
    for epochs, newest in ((3, [1, 0, 0]), (2, [2, 2, 1])):
        memory.epochs = epochs
        assert memory.nearest_other().tolist() == newest
    memory.observe([0], torch.ones(1, 2))  # an empty cache ties: the list is 0, 1
    assert memory.nearest_other([0]).tolist() == [1]


def test_oracle_follows_its_schedule_and_stays_in_the_class() -> None:
    labels = torch.arange(20_000) % 10
    oracle = Oracle(labels, epochs=11, p=0.5, seed=0)
    assert torch.equal(oracle.partners(0), torch.arange(20_000))  # q(0) = 1
    for epoch, q in ((5, 0.75), (10, 0.5)):
        partners = oracle.partners(epoch)
        assert torch.equal(labels[partners], labels)
        changed = (partners != torch.arange(20_000)).double().mean()
        assert abs(float(changed) - (1 - q) * (1 - 1 / 2000)) < 0.01
    some = torch.tensor([7, 7, 19_999])
    assert torch.equal(oracle.partners(5, some), oracle.partners(5)[some])


def test_oracle_draws_every_member_of_a_class_alike() -> None:
    labels = torch.tensor([0, 1, 0, 0, 1])
    oracle = Oracle(labels, epochs=1, p=0.0, seed=0)

    counts = torch.zeros(5)
    for seed in range(3000):
        oracle.seed = seed
        counts[oracle.partners(1, torch.tensor([0]))] += 1  # epoch 1 of 1: q = p
    assert counts[1] == counts[4] == 0
    assert (counts[[0, 2, 3]] / 3000 - 1 / 3).abs().max() < 0.04


def test_oracle_refuses_images_without_a_label() -> None:
    with pytest.raises(UserError, match="2 have none"):
        Oracle(torch.tensor([0, -1, 1, -1]), epochs=2, p=0.0, seed=0)
