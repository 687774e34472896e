"""The running means and the pair policy `confident` against loops written from their equations."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from adasim.config import Config, NeighborsConfig
from adasim.neighbors import Confident, ConfidentSettings, MeanFeatures, NeighborMemory, PairContext
from adasim.neighbors import means as means_module
from adasim.neighbors.pairs import confident_partners
from adasim.util.errors import UserError


def epochs_of_features(n: int, dim: int, epochs: int) -> list[tuple[Tensor, Tensor]]:
    """(ids, features) per epoch: some images are left out now and then, image 1 always."""
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(n, dim, generator=generator) + 2.0  # much in common, so that centring matters
    shown = []
    for _ in range(epochs):
        ids = torch.randperm(n, generator=generator)[: n - 3]
        ids = ids[ids != 1]
        shown.append((ids, base[ids] + 0.7 * torch.randn(len(ids), dim, generator=generator)))
    return shown


def brute_force(shown: list[tuple[Tensor, Tensor]], decay: float) -> tuple[dict[int, int], dict[int, float]]:
    """Nearest other image and centred cosine."""
    scores = all_scores(shown, decay)
    best = {i: max(others, key=others.__getitem__) for i, others in scores.items()}
    return best, {i: scores[i][j] for i, j in best.items()}


def all_scores(shown: list[tuple[Tensor, Tensor]], decay: float) -> dict[int, dict[int, float]]:
    """Centred cosine of each image with each other one, in fp64, image by image."""
    mean: dict[int, Tensor] = {}
    for ids, features in shown:
        for i, z in zip(ids.tolist(), normalize(features.double(), dim=1), strict=True):
            mean[i] = decay * mean[i] + (1 - decay) * z if i in mean else z
    centre = sum(mean.values()) / len(mean)
    return {
        i: {j: float((m - centre) @ (x - centre) / ((m - centre).norm() * (x - centre).norm()))
            for j, x in mean.items() if j != i}
        for i, m in mean.items()
    }  # fmt: skip


def memory_of(shown: list[tuple[Tensor, Tensor]], n: int, decay: float = 0.8) -> NeighborMemory:
    memory = NeighborMemory(n, shown[0][1].shape[1], window=1, k=3, mean_decay=decay)
    for ids, features in shown:
        for part in (slice(0, 20), slice(20, None)):
            memory.observe(ids[part], features[part])
        memory.end_epoch()
    return memory


@pytest.mark.parametrize("decay", [0.0, 0.8])
def test_the_nearest_other_image_is_that_of_a_brute_force(
    decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(means_module, "_BLOCK", 16)
    shown = epochs_of_features(50, 8, 4)
    memory = memory_of(shown, 50, decay)
    assert memory.means is not None
    partners, similarities = (column[:, 0] for column in memory.means.nearest_others())
    best, expected = brute_force(shown, decay)
    for i in range(50):
        assert partners[i] == best.get(i, i)
        assert similarities[i] == pytest.approx(expected.get(i, -torch.inf), abs=1e-5)
    assert partners[1] == 1  # never shown
    assert 1 not in partners[torch.arange(50) != 1]


def test_without_lists_nobody_is_looked_up_and_the_means_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = epochs_of_features(50, 8, 4)
    lists = memory_of(shown, 50)
    monkeypatch.setattr(NeighborMemory, "_lookup", lambda *_: pytest.fail("a search"))
    memory = NeighborMemory(50, 8, window=1, k=1, mean_decay=0.8, lists=False)
    for ids, features in shown:
        similarities, neighbours = memory.observe(ids, features)
        assert torch.equal(neighbours[:, 0], ids)
        assert (similarities == 1).all()
        memory.end_epoch()
    assert memory.means is not None
    assert lists.means is not None
    assert torch.equal(memory.means.values, lists.means.values)
    assert torch.equal(memory.draw_partners(4, 0.2, 0), torch.arange(50))  # nobody to draw
    with pytest.raises(ValueError, match="k=3 must be 1"):
        NeighborMemory(50, 8, window=1, k=3, lists=False)


def test_the_most_similar_share_has_partners_and_the_others_have_not() -> None:
    shown = epochs_of_features(50, 8, 4)
    policy = Confident(memory_of(shown, 50), ConfidentSettings(share=0.2, start=2), epochs=9)
    best, similarity = brute_force(shown, 0.8)
    surest = sorted(similarity, key=similarity.__getitem__, reverse=True)[:10]
    partners = policy.partners(4)
    assert {i for i in range(50) if partners[i] != i} == set(surest)
    assert all(partners[i] == best[i] for i in surest)
    some = torch.tensor([surest[0], 1, surest[3]])
    assert torch.equal(policy.partners(4, some), partners[some])
    assert torch.equal(Confident(policy.memory, policy.settings, 9).partners(1), torch.arange(50))


def test_a_partner_is_drawn_among_the_nearest_that_are_similar_enough() -> None:
    shown = epochs_of_features(50, 8, 4)
    settings = ConfidentSettings(share=0.8, start=2, partners=3)
    memory = memory_of(shown, 50)
    scores = all_scores(shown, 0.8)
    nearest = {i: sorted(others, key=others.__getitem__, reverse=True)[:3] for i, others in scores.items()}
    surest = sorted(scores, key=lambda i: scores[i][nearest[i][0]], reverse=True)[:40]
    least = scores[surest[-1]][nearest[surest[-1]][0]]
    allowed = {i: {j for j in nearest[i] if scores[i][j] >= least - 1e-9} for i in surest}
    drawn: dict[int, list[int]] = {i: [] for i in surest}
    for seed in range(300):
        partners = Confident(memory, settings, epochs=9, seed=seed).partners(4)
        assert {i for i in range(50) if partners[i] != i} == set(surest)
        for i in surest:
            drawn[i].append(int(partners[i]))
    assert {i: set(found) for i, found in drawn.items()} == allowed
    assert {len(found) for found in allowed.values()} == {1, 2, 3}
    for i, found in drawn.items():  # each as often as the others: 4 standard deviations
        p = 1 / len(allowed[i])
        assert all(abs(found.count(j) / 300 - p) < 4 * (p * (1 - p) / 300) ** 0.5 + 1e-9 for j in allowed[i])
    some = torch.tensor(surest[:4])
    policy = Confident(memory, settings, epochs=9, seed=1)
    assert torch.equal(policy.partners(4, some), policy.partners(4)[some])
    assert not torch.equal(policy.partners(4), policy.partners(5))  # of the same means


def test_an_image_without_a_match_has_no_partner_and_lowers_no_threshold() -> None:
    others = torch.tensor([[1, 2], [0, 2], [0, 1], [3, 3]])
    similarities = torch.tensor([[0.9, 0.2], [0.9, 0.1], [0.8, 0.7], [-torch.inf, -torch.inf]])
    for u in (0.0, 0.6, 0.99):
        partners = confident_partners(others, similarities, 1.0, torch.full((4,), u))
        assert partners.tolist() == [1, 0, 0, 3]  # 0.8 is the least of the nearest, and no second reaches it


def test_the_share_grows_linearly_to_the_last_epoch() -> None:
    policy = Confident(
        memory_of(epochs_of_features(50, 8, 4), 50),
        ConfidentSettings(share=0.1, share_end=0.3, start=5),
        epochs=26,
    )
    assert [round(policy.share(e), 3) for e in (0, 4, 5, 15, 25)] == [0, 0, 0.1, 0.2, 0.3]
    counts = [int((policy.partners(e) != torch.arange(50)).sum()) for e in (4, 5, 15, 25)]
    assert counts == [0, 5, 10, 15]


def test_partners_change_with_the_means_and_not_before() -> None:
    shown = epochs_of_features(50, 8, 6)
    memory = memory_of(shown[:4], 50)
    policy = Confident(memory, ConfidentSettings(share=1.0), epochs=9)
    before = policy.partners(5)
    memory.observe(*shown[4])
    assert torch.equal(policy.partners(5), before)
    assert memory.means is not None
    assert torch.equal(memory.means.nearest_others()[0][:, 0], before)  # not only remembered
    memory.end_epoch()
    assert not torch.equal(policy.partners(6), before)


def test_an_image_alone_has_itself() -> None:
    means = MeanFeatures(3, range(3), 2, decay=0.5)
    assert means.nearest_others(2)[0].tolist() == [[0, 0], [1, 1], [2, 2]]
    means.update(torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]]), torch.tensor([True, False, False]))
    partners, similarities = means.nearest_others()
    assert partners.tolist() == [[0], [1], [2]]
    assert similarities.tolist() == [[-torch.inf]] * 3


def test_the_settings_of_a_policy_travel_with_the_configuration() -> None:
    config = Config(pairs="confident", pair_settings=ConfidentSettings(share=0.3))
    assert config.to_dict()["confident"]["share"] == 0.3
    assert Config.from_dict(config.to_dict()) == config
    assert "confident" not in Config().to_dict()
    memory = memory_of(epochs_of_features(9, 4, 2), 9)
    context = PairContext(9, 10, 0, NeighborsConfig(), memory, None, config.pair_settings)
    assert Confident.build(context).settings.share == 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": 1.2}, "confident.share=1.2"),
        ({"share": "a fifth"}, "confident.share"),
        ({"decay": 1.0}, "confident.decay=1.0"),
        ({"start": 0}, "confident.start=0"),
        ({"partners": 0}, "confident.partners=0"),
    ],
)
def test_senseless_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ConfidentSettings(**changes)


def test_settings_of_another_policy_are_refused() -> None:
    with pytest.raises(UserError, match="pairs=adasim takes no settings, not ConfidentSettings"):
        Config(pairs="adasim", pair_settings=ConfidentSettings())
