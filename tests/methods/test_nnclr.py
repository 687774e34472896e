"""NNCLR against a case worked out by hand, and its queue."""

import math

import pytest
import torch

from adasim.config import ModelConfig
from adasim.methods import EncodedView, Nnclr, NnclrSettings


def nnclr(**settings):
    torch.manual_seed(0)
    model = ModelConfig(name="resnet_tiny", drop_path=0.0)
    defaults = {"proj_dim": 2, "pred_dim": 4, "queue_size": 3, "temperature": 0.5}
    return Nnclr(model, NnclrSettings(**defaults | settings), 32, 1)


def view(z, p):
    z, p = torch.tensor(z), torch.tensor(p)
    return EncodedView(z, z, z, p)


def test_loss_is_info_nce_of_the_nearest_in_the_queue():
    method = nnclr()
    method.queue.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
    first = view([[2.0, 1.0], [1.0, 3.0]], [[3.0, 0.0], [0.0, 1.0]])  # nearest: rows 0 and 1
    second = view([[-2.0, 0.1], [0.1, 1.0]], [[0.6, 0.8], [0.0, 2.0]])  # nearest: rows 2 and 1
    # NN(z1) . p2 / 0.5, a row per image: (1, 0) -> 1.2, 0.0;  (0, 1) -> 1.6, 2.0
    # NN(z2) . p1 / 0.5:                  (-1, 0) -> -2.0, 0.0;  (0, 1) -> 0.0, 2.0
    rows = [([1.2, 0.0], 0), ([1.6, 2.0], 1), ([-2.0, 0.0], 0), ([0.0, 2.0], 1)]
    terms = [math.log(sum(map(math.exp, logits))) - logits[own] for logits, own in rows]
    assert method.loss([first, second], 0).loss.item() == pytest.approx(0.5 * sum(terms) / 2, rel=1e-6)


def test_without_a_queue_the_other_view_is_the_positive():
    method = nnclr(queue_size=0)
    first = view([[1.0, 0.0], [0.0, 1.0]], [[1.0, 0.0], [0.0, 1.0]])
    loss = method.loss([first, first], 0).loss.item()  # logits 2 and 0, both directions
    assert loss == pytest.approx(math.log(math.exp(2) + 1) - 2, rel=1e-6)
    method.after_step(0, 10)
    assert method.queue.shape == (0, 2)


def test_all_micro_batches_of_a_step_enter_the_queue():
    method = nnclr()
    last = method.queue[2].tolist()
    method.loss([view([[3.0, 0.0]], [[1.0, 0.0]])] * 2, 0)
    method.continues_step = True
    method.loss([view([[0.0, 2.0]], [[0.0, 1.0]])] * 2, 0)
    method.continues_step = False
    method.after_step(0, 10)
    assert method.queue.tolist() == [[1.0, 0.0], [0.0, 1.0], last]


def test_the_oldest_embeddings_leave_the_queue_first_and_only_after_a_sound_step():
    method = nnclr()
    before = method.queue.clone()
    pair = [view([[3.0, 0.0], [0.0, 2.0]], [[1.0, 0.0], [0.0, 1.0]])] * 2
    method.loss(pair, 0)
    assert torch.equal(method.queue, before)
    method.after_step(0, 10)
    assert method.queue.tolist() == [[1.0, 0.0], [0.0, 1.0], before[2].tolist()]
    method.loss([view([[-1.0, 0.0], [0.0, -1.0]], [[1.0, 0.0], [0.0, 1.0]])] * 2, 0)
    method.after_step(1, 10)
    assert method.queue.tolist() == [[0.0, -1.0], [0.0, 1.0], [-1.0, 0.0]]
    method.after_step(2, 10)  # nothing new: nothing moves
    assert int(method.place) == 1
    method.loss([view([[1.0, 0.0]] * 3 + [[0.0, 1.0]], [[1.0, 0.0]] * 4)] * 2, 0)  # more than the queue holds
    method.after_step(3, 10)
    assert sorted(method.queue.tolist()) == [[0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
