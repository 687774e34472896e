"""`adasim pretrain photos`: what it proposes for real images on this machine, and what it asks."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import safetensors.torch
import timm
import torch
from helpers import of_known_speed
from PIL import Image

from adasim.cli.main import main
from adasim.cli.photos import agreed
from adasim.cli.pretrain import shortened
from adasim.config import Config
from adasim.data import ImageSet
from adasim.dist.processes import Distributed
from adasim.models import EvalTransform
from adasim.recipes import for_epochs, get_recipe
from adasim.run import load_run
from adasim.runs.folder import RunFolder
from adasim.tools import photos
from adasim.tools.plan import warning
from adasim.train.budget import Speed, time_steps
from adasim.util.errors import UserError

QUICK = ["--from-scratch", "--no-curves", "--no-compare"]


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


def test_a_laptop_gets_a_run_that_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos, "time_steps", partial(time_steps, seconds=0.2))  # instead of four
    said: list[str] = []
    proposal = photos.propose(str(folder), hours=0.01, device="cpu", say=said.append)
    config = proposal.config
    assert proposal.seconds <= 36
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

    monkeypatch.setattr(photos, "time_steps", on_a_machine)
    proposal = photos.propose(str(folder), hours=0.001, device="cpu", say=lambda text: None)
    assert (proposal.config.model.name, len(tried)) == (chosen, timed)
    assert proposal.seconds <= 3.6


def test_the_proposed_run_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(photos, "time_steps", of_known_speed)
    out = tmp_path / "run"
    main(
        [
            "pretrain",
            "photos",
            "--data",
            str(folder),
            "--out",
            str(out),
            "--hours",
            "0.001",
            "--yes",
            "--from-scratch",
            "--no-compare",
            "--seed",
            "3",
            "--no-curves",
        ]
    )
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "40 images without labels" in shown
    assert "measured" in shown
    run = load_run(out)
    assert run.config.recipe == "photos"
    assert run.config.epochs == 8  # 90 % of 3.6 s at 100 images/s
    assert run.config.seed == 3  # any option changes the proposal
    assert run.metrics[-1]["epoch"] == run.config.epochs - 1


def test_a_job_that_slurm_starts_again_goes_on_with_its_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the very same command: nothing is measured and proposed again."""
    resumed: list[list[str]] = []
    monkeypatch.setattr("adasim.cli.photos.resume", resumed.append)
    monkeypatch.setenv("SLURM_JOB_ID", "5")
    out = str(tmp_path / "run")
    RunFolder.create(tmp_path / "run", Config(), {}).close()
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    main(["pretrain", "photos", "--data", str(folder), "--out", out, "--yes", "--no-curves"])
    assert resumed == [["--resume", out, "--no-curves"]]


@pytest.mark.parametrize(
    "options",
    [["--method", "dino", "--dino.out-dim", "64"], ["--pairs", "confident", "--confident.start", "1"]],
)
def test_method_and_pairs_may_be_others(
    options: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photos, "time_steps", of_known_speed)
    out = tmp_path / "run"
    asked = ["--data", str(folder), "--out", str(out), "--hours", "0.0005", "--yes", *QUICK]
    main(["pretrain", "photos", *asked, *options])
    assert getattr(load_run(out).config, options[0].strip("-")) == options[1]


def test_the_plan_that_is_shown_is_the_one_that_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(photos, "time_steps", lambda *_, **__: Speed(100, 0.01))
    started: list[Config] = []
    monkeypatch.setattr("adasim.api.pretrain", lambda config, *_, **__: started.append(config))
    asked = ["--data", str(folder), "--out", str(tmp_path / "run"), "--hours", "0.001", "--yes", *QUICK]
    main(["pretrain", "photos", *asked, "--epochs", "4", "--batch-size", "5", "--views.size", "48"])
    assert (started[0].epochs, started[0].batch_size) == (4, 5)
    plan = re.sub(r" +", " ", capsys.readouterr().out)
    for words in (
        "batch 5 5 at once",
        "epochs 4 0:02 in all",
        "resnet_tiny at 48 pixels simsiam, from scratch",
    ):
        assert words in plan


def _say(answer: str, question: str) -> str:
    return answer


def test_the_end_of_input_is_a_no() -> None:
    def ended(question: str) -> str:
        raise EOFError

    assert not agreed(ended)
    for answer, expected in (("", True), (" Y ", True), ("yes", True), ("n", False), ("later", False)):
        assert agreed(partial(_say, answer)) is expected


def test_it_asks_and_without_a_terminal_says_so(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["pretrain", "photos", "--data", str(folder), "--out", str(tmp_path / "run")])
    assert stopped.value.code == 2
    assert not (tmp_path / "run").exists()


def test_too_few_and_too_many_images_are_a_sentence(folder: Path, tmp_path: Path) -> None:
    write_images(tmp_path / "few", [(32, 32)] * 5)
    with pytest.raises(UserError, match="5 images are too few"):
        photos.propose(str(tmp_path / "few"))
    with pytest.raises(UserError, match=r"too long for 1e-05 h. Give --hours"):
        photos.propose(str(folder), hours=1e-5, device="cpu", say=lambda text: None)
    for hours in (0, float("inf"), float("nan")):
        with pytest.raises(UserError, match=f"hours={hours} must be above 0"):
            photos.propose(str(folder), hours=hours)


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
    shortened(get_recipe("dino-vit-s16"), "8", print)
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "For --epochs 8 instead of 800" in shown
    assert "--optim.warmup-epochs 2, --dino.teacher-temp-warmup-epochs 4, --neighbors.window 2" in shown
    shortened(get_recipe("dino-vit-s16"), "many", print)  # refused later, where options are read
    assert capsys.readouterr().out == ""


@pytest.fixture
def weights(tmp_path: Path) -> str:
    """A model of timm with a classifier, as a file of somebody else's."""
    torch.manual_seed(0)
    net = timm.create_model("test_efficientnet.r160_in1k", pretrained=False)
    safetensors.torch.save_file(net.state_dict(), tmp_path / "weights.safetensors")
    return f"test_efficientnet.r160_in1k:{tmp_path / 'weights.safetensors'}"


def test_photos_goes_on_from_weights_with_their_architecture_size_and_normalisation(
    weights: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photos, "time_steps", of_known_speed)
    started: list[Config] = []
    monkeypatch.setattr("adasim.api.pretrain", lambda config, *_, **__: started.append(config))
    asked = ["--data", str(folder), "--out", str(tmp_path / "run"), "--hours", "0.001", "--yes"]
    main(["pretrain", "photos", *asked, "--model.init", weights])
    config = started[0]
    wanted = EvalTransform.for_timm(timm.create_model("test_efficientnet.r160_in1k", pretrained=False))
    assert (config.model.name, config.model.init) == ("test_efficientnet.r160_in1k", weights)
    assert (config.views.size, config.views.mean, config.views.std) == (wanted.size, wanted.mean, wanted.std)
    assert config.epochs == 8  # 90 % of 3.6 s at 100 images/s
    assert config.model.freeze_norm
    assert 0 < config.optim.head_epochs < config.epochs
    assert config.optim.encoder_lr < 1


def test_photos_starts_from_weights_that_timm_can_get(
    weights: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Through timm and its hub, from a cache where random weights stand in for downloaded ones."""
    name = "test_efficientnet.r160_in1k"
    monkeypatch.setitem(photos.WEIGHTS, "cpu", name)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(photos, "time_steps", of_known_speed)
    started: list[Config] = []
    monkeypatch.setattr("adasim.api.pretrain", lambda config, *_, **__: started.append(config))
    asked = ["--data", str(folder), "--out", str(tmp_path / "run"), "--hours", "0.001", "--yes"]
    main(["pretrain", "photos", *asked])
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert f"Weights to go on from: {name}" in shown
    assert "licence apache-2.0" in shown
    assert "This run would start from scratch" in shown
    assert "hardly be better than raw pixels" in shown
    assert started[-1].model.init == ""
    snapshot = tmp_path / "hub" / f"models--timm--{name}" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0" * 40)
    (tmp_path / "weights.safetensors").rename(snapshot / "model.safetensors")
    main(["pretrain", "photos", *asked])
    assert started[-1].model.init == name
    assert "scratch" not in re.sub(r"--from-scratch", "", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--epoch", "5"], "--epoch"),
        (["--model.init", "nowhere.pth"], "nowhere.pth"),
        (["--model.init", "x.pth", "--from-scratch"], "exclude each other"),
        (["--exclude", "nowhere.csv"], "nowhere.csv"),
        (["--hours", "0"], "hours"),
    ],
)
def test_options_of_photos_are_refused_before_anything_is_timed(
    options: list[str],
    reason: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(photos, "time_steps", None)
    scratch = [] if "--from-scratch" in options or "--model.init" in options else ["--from-scratch"]
    asked = ["--data", str(folder), "--out", str(tmp_path / "run"), "--yes", *scratch]
    with pytest.raises(SystemExit) as stopped:
        main(["pretrain", "photos", *asked, *options])
    assert stopped.value.code == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_help_of_photos_lists_the_options_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["pretrain", "photos", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--hours", "--from-scratch", "--optim.lr", "--model.init"))


def test_little_data_from_scratch_is_warned_of() -> None:
    config = get_recipe("desk-resnet")
    config.data.source = "photos"
    told = warning(config, 3000)
    assert told
    assert "--model.init" in told
    assert warning(config, 50_000) is None
    config.epochs = 10
    assert warning(config, 50_000)
    config.model.init = "resnet18"
    assert warning(config, 3000) is None


def test_weights_of_another_model_are_refused_before_anything_is_timed(
    weights: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(photos, "time_steps", None)
    with pytest.raises(UserError, match="does not fit resnet18"):
        photos.propose(str(folder), init=f"resnet18:{weights.partition(':')[2]}", say=lambda text: None)


def test_images_are_looked_at_before_weights_are_looked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(photos, "find_weights", None)
    with pytest.raises(UserError):
        photos.propose(str(tmp_path))
    with pytest.raises(UserError, match="hours"):
        photos.propose(str(tmp_path), hours=0)


def test_the_short_help_of_photos_is_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    main(["pretrain", "photos", "-h"])
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) <= 24
    assert all(option in shown for option in ("--data", "--hours", "--from-scratch", "--model.init"))
