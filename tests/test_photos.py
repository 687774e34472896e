"""`adasim pretrain photos`: what it proposes for real images on this machine, and what it asks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from helpers import command, hub_cache, in_one_line, of_known_speed, refusal
from PIL import Image

from adasim.api import load_run
from adasim.cli.pretrain import agreed, shortened
from adasim.config import Config
from adasim.data import ImageSet
from adasim.dist.processes import Distributed
from adasim.models import EvalTransform
from adasim.recipes import for_epochs, get_recipe
from adasim.runs.folder import RunFolder
from adasim.tools import plan
from adasim.train.budget import Speed, time_steps
from adasim.util.errors import UserError

NAME = "test_efficientnet.r160_in1k"


def write_images(folder: Path, sizes: list[tuple[int, int]]) -> None:
    random = np.random.default_rng(0)
    folder.mkdir()
    for i, (height, width) in enumerate(sizes):
        Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8)).save(folder / f"{i:03}.jpg")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """40 photos of several sizes."""
    write_images(tmp_path / "photos", [(48 + i, 64 + 2 * i) for i in range(40)])
    return tmp_path / "photos"


@pytest.fixture
def asked(folder: Path, tmp_path: Path) -> str:
    return f"pretrain photos --data {folder} --out {tmp_path / 'run'} --hours 0.001 --yes"


@pytest.fixture
def known_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "time_steps", of_known_speed)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, known_speed: None) -> list[Config]:
    """What would be trained, on a machine of known speed."""
    started: list[Config] = []
    monkeypatch.setattr("adasim.api.pretrain", lambda config, *_, **__: started.append(config))
    return started


def test_a_laptop_gets_a_run_that_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "time_steps", partial(time_steps, seconds=0.2))  # instead of four
    said: list[str] = []
    proposal = plan.propose(str(folder), hours=0.1, device="cpu", say=said.append)
    config = proposal.config
    assert proposal.seconds <= 360
    assert config.batch_size == 4
    assert 4 <= config.epochs <= 400
    assert config.neighbors.window <= config.epochs / 4
    config.check(40, has_labels=False)
    assert any("timing a few steps" in line for line in said)


@pytest.mark.parametrize(
    ("flops_per_second", "chosen", "timed"),
    [(1e10, "resnet_tiny", 1), (1e11, "resnet_tiny", 2), (1e13, "resnet18", 3), (1e15, "vit_small", 5)],
)
def test_the_largest_that_gets_through_enough_epochs_is_proposed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, flops_per_second: float, chosen: str, timed: int
) -> None:
    """On machines of given speeds, for 3.6 seconds."""
    tried = []

    def on_a_machine(config: Config, images: ImageSet, ranks: Distributed, *, at_once: int) -> Speed:
        assert config.batch_size % at_once == 0
        tried.append(config.model.name)
        billions = {32: 0.06, 64: 0.25, 96: 4, 160: 25, 224: 74}[config.views.size]  # of operations per image
        busy = 1e9 * billions / flops_per_second
        return Speed(1 / busy, busy)

    monkeypatch.setattr(plan, "time_steps", on_a_machine)
    proposal = plan.propose(str(folder), hours=0.001, device="cpu", say=lambda text: None)
    assert (proposal.config.model.name, len(tried)) == (chosen, timed)
    assert proposal.seconds <= 3.6


@pytest.mark.usefixtures("known_speed")
def test_the_proposed_run_runs_with_whatever_is_changed_of_it(
    asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = "--seed 3 --batch-size 5 --views.size 48 --method dino --dino.out-dim 64 --pairs nearest"
    command(f"{asked} {changes} --nearest.space latent --from-scratch --no-curves --no-compare")
    shown = in_one_line(capsys.readouterr().out)
    run = load_run(tmp_path / "run")
    config = run.config
    assert config.recipe == "photos"
    assert config.epochs == 8  # 90 % of 3.6 s at 100 images/s
    assert (config.seed, config.settings.out_dim, config.pair_settings.space) == (3, 64, "latent")
    assert run.metrics[-1]["epoch"] == 7
    size = "resnet_tiny at 48 pixels"
    for words in ("40 images without labels", "measured", size, "5 at once", "dino, from scratch"):
        assert words in shown


def test_a_job_that_slurm_starts_again_goes_on_with_its_run(
    asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the very same command: nothing is measured and proposed again."""
    resumed: list[list[str]] = []
    monkeypatch.setattr("adasim.cli.pretrain.resume", resumed.append)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    RunFolder.create(tmp_path / "run", Config(), {}).close()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    command(f"{asked} --no-curves")
    assert resumed == [["--resume", str(tmp_path / "run"), "--no-curves"]]


def test_the_end_of_input_is_a_no() -> None:
    def ended(question: str) -> str:
        raise EOFError

    assert not agreed(ended)
    for answer, expected in {"": True, " Y ": True, "yes": True, "n": False, "later": False}.items():
        assert agreed(lambda question, answer=answer: answer) is expected  # type: ignore[misc]


def test_too_few_and_too_many_images_are_a_sentence(folder: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "few", [(32, 32)] * 5)
    with pytest.raises(UserError, match="5 images are too few"):
        plan.propose(str(tmp_path / "few"))
    with pytest.raises(UserError, match=r"too long for 1e-05 h. Give --hours"):
        plan.propose(str(folder), hours=1e-5, device="cpu", say=lambda text: None)


def test_warm_ups_and_window_follow_few_epochs() -> None:
    few = for_epochs(get_recipe("dino-vit-s16"), 8)
    assert (few.epochs, few.optim.warmup_epochs, few.neighbors.window) == (8, 2, 2)
    assert few.settings.teacher_temp_warmup_epochs == 4
    few.check(10_000, has_labels=False)
    as_published = for_epochs(get_recipe("dino-vit-s16"), 100)
    assert as_published.optim == get_recipe("dino-vit-s16").optim
    assert as_published.settings == get_recipe("dino-vit-s16").settings
    one = for_epochs(get_recipe("desk-vit"), 1)
    assert (one.optim.warmup_epochs, one.neighbors.window) == (1, 1)


def test_what_was_shortened_is_said_and_may_be_overridden(capsys: pytest.CaptureFixture[str]) -> None:
    shortened(get_recipe("dino-vit-s16"), 8, print)
    shown = in_one_line(capsys.readouterr().out)
    assert "For --epochs 8 instead of 800" in shown
    for option in ("--optim.warmup-epochs 2", "--dino.teacher-temp-warmup-epochs 4", "--neighbors.window 2"):
        assert option in shown


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A model of timm with a classifier, as a file of somebody else's."""
    torch.manual_seed(0)
    net = timm.create_model(NAME, pretrained=False)
    safetensors.torch.save_file(net.state_dict(), tmp_path / "weights.safetensors")
    return f"{NAME}:{tmp_path / 'weights.safetensors'}"


def test_photos_goes_on_from_weights_with_their_architecture_size_and_normalisation(
    weights: str, asked: str, started: list[Config]
) -> None:
    command(f"{asked} --model.init {weights}")
    config = started[0]
    wanted = EvalTransform.for_timm(timm.create_model(NAME, pretrained=False))
    assert (config.model.name, config.model.init) == (NAME, weights)
    assert (config.views.size, config.views.mean, config.views.std) == (wanted.size, wanted.mean, wanted.std)
    assert config.epochs == 8  # 90 % of 3.6 s at 100 images/s
    assert config.model.freeze_norm
    assert 0 < config.optim.head_epochs < config.epochs
    assert config.optim.encoder_lr < 1


def test_photos_starts_from_weights_that_timm_can_get(
    weights: str,
    asked: str,
    started: list[Config],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through timm and its hub, from a cache where random weights stand in for downloaded ones."""
    monkeypatch.setitem(plan.WEIGHTS, "cpu", NAME)
    downloaded = hub_cache(monkeypatch, tmp_path / "hub", f"timm/{NAME}")
    command(asked)
    shown = in_one_line(capsys.readouterr().out)
    for words in (NAME, "licence apache-2.0", "would start from scratch", "hardly be better than raw pixels"):
        assert words in shown
    assert started[-1].model.init == ""
    (tmp_path / "weights.safetensors").rename(downloaded / "model.safetensors")
    command(asked)
    assert started[-1].model.init == NAME
    assert "scratch" not in capsys.readouterr().out.replace("--from-scratch", "")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--model.init nowhere.pth", "nowhere.pth"),
        ("--model.init x.pth --from-scratch", "exclude each other"),
        ("--from-scratch --exclude nowhere.csv", "nowhere.csv"),
        ("--from-scratch --hours 0", "hours"),
        ("--model.init resnet18:{weights}", "does not fit resnet18"),
    ],
)
def test_options_of_photos_are_refused_before_anything_is_timed(
    options: str,
    reason: str,
    asked: str,
    weights: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(plan, "time_steps", None)
    assert reason in refusal(f"{asked} {options.format(weights=weights.partition(':')[2])}", capsys)
    assert not (tmp_path / "run").exists()


def test_little_data_from_scratch_is_warned_of() -> None:
    config = get_recipe("desk-resnet")
    config.data.source = "photos"
    told = plan.warning(config, 3000)
    assert told
    assert "--model.init" in told
    assert plan.warning(config, 50_000) is None
    config.epochs = 10
    assert plan.warning(config, 50_000)
    config.model.init = "resnet18"
    assert plan.warning(config, 3000) is None
