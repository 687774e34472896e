"""What is shown during a run: the right figures, on a terminal and off it."""

import io
import math
from contextlib import suppress
from pathlib import Path
from statistics import mean

import pytest
import torch
from pretrainings import small
from rich.console import Console
from torch.nn import functional as F

from adasim.api import pretrain
from adasim.data import Batch, open_images
from adasim.neighbors import NeighborMemory
from adasim.train.report import Progress, nearer_in_class, regime
from adasim.train.state import TrainState
from adasim.util.units import duration


class Clock:
    """Time that passes when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def plain(width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=False, width=width, highlight=False)


def output(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def run(bar: Progress, clock: Clock, steps: int, per_epoch: int, seconds: float = 1.0) -> None:
    for step in range(bar.step, bar.step + steps):
        clock.now += seconds
        epoch = step // per_epoch
        bar.update(step=step + 1, epoch=epoch, loss=6.0, images=64, waited_s=0.25 * seconds, bootstrap=0.17)


def test_speed_waiting_and_time_left_are_those_of_the_last_steps_of_this_process() -> None:
    """64 images every 2 s, half a second of it waiting: 90 steps that are left take 180 s."""
    clock = Clock()
    with Progress(1000, 10, console=plain(), clock=clock) as bar:
        assert bar.seconds_left is None
        bar.step = 900  # before a resume
        run(bar, clock, 10, 100, seconds=2.0)
        assert bar.images_per_second == pytest.approx(32.0)
        assert bar.waiting == pytest.approx(0.25)
        assert bar.seconds_left == pytest.approx(180.0)
        run(bar, clock, 1000, 10_000, seconds=0.1)
        assert bar.images_per_second == pytest.approx(640, rel=0.1)


def test_without_a_terminal_there_is_a_line_per_epoch_and_per_interval() -> None:
    clock, console = Clock(), plain()
    with Progress(40, 2, console=console, every_s=8, clock=clock) as bar:
        run(bar, clock, 40, 20)
        bar.say(
            "A [warning] in brackets, longer than the eighty columns that a log file does not have anyway."
        )
    text = output(console).splitlines()
    assert text[0] == (
        "epoch 1/2, step 1/40 (2%), loss 6, 64 images/s, waiting for data 25%, bootstrapped 17%, 0:39 left"
    )
    steps = [int(line.split("step ")[1].split("/")[0]) for line in text[:-1]]
    assert steps == [1, 9, 17, 21, 29, 37, 40]  # every 8 s, at the new epoch, at the end
    assert text[-1].startswith("A [warning] in brackets")
    assert "\x1b" not in output(console)


def test_an_interrupted_run_ends_with_a_line_of_where_it_stopped() -> None:
    clock, console = Clock(), plain()
    with suppress(KeyboardInterrupt), Progress(100, 1, console=console, clock=clock) as bar:
        run(bar, clock, 7, 100)
        raise KeyboardInterrupt
    assert "step 7/100" in output(console).splitlines()[-1]


def test_a_run_without_steps_says_nothing() -> None:
    console = plain()
    with Progress(0, 1, console=console):
        pass
    assert output(console) == ""


@pytest.mark.parametrize("epochs", [5, 1000])
@pytest.mark.parametrize("seconds", [0.01, 4000.0])
def test_on_a_terminal_the_bar_fits_eighty_columns(epochs: int, seconds: float) -> None:
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    total = 1000 * epochs
    with Progress(total, epochs, console=console, clock=clock) as bar:
        bar.step = total - 995
        run(bar, clock, 5, 1000, seconds)
        bar.say("A message.")
        shown = Console(file=io.StringIO(), width=80, color_system=None)
        shown.print(bar._bar())
    top, bottom = output(shown).splitlines()
    assert top.startswith(f"Epoch {epochs}/{epochs} ━")
    assert top.endswith(f"{100 * (total - 990) // total}% {duration(bar.seconds_left or 0)} left")
    assert "loss 6 " in bottom
    assert bottom.rstrip().endswith("bootstrapped 17%")
    assert len(top) <= 80
    assert len(bottom) <= 80
    assert "A message." in output(console)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (7.4, "0:07"), (59.6, "1:00"), (760, "12:40"), (11_100, "3:05:00"), (187_800, "2 d 04:10")],
)
def test_durations_are_written_as_people_do(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_the_regime_of_a_run_is_told_once_as_the_window_and_the_partners_have_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = small(epochs=5)
    images = open_images(config.data.source)
    assert images.labels is not None
    images.labels = labels = images.labels % 2  # so that some partners are of the image's class
    heard: dict[int, tuple[float, float, float]] = {}
    near: list[float] = []

    def look(state: TrainState, batch: Batch, loss: float) -> None:
        memory = state.memory
        assert memory is not None
        if state.step_in_epoch == 3:  # by brute force: the sum of the window's lists, ties to the smaller id
            ids = torch.arange(48)
            gate = sum(best_match(memory, int(i)) == i for i in ids) / 48
            partners = memory.draw_partners(state.epoch, config.neighbors.tau, config.seed)
            joined = partners != ids
            right = (labels[partners] == labels)[joined].float().mean()
            heard[state.epoch] = gate, float(joined.float().mean()), float(right)
            if state.epoch == 2:
                for i in ids[joined & (labels[partners] == labels)].tolist():
                    cosines = memory.features(ids) @ memory.features([i])[0]
                    mates = ids[(labels == labels[i]) & (ids != i)]
                    near.append(float((cosines[mates] > cosines[partners[i]]).float().mean()))

    pretrain(config, tmp_path / "run", data=images, on_step=look)
    said = [line for line in capsys.readouterr().out.splitlines() if "AdaSim's pairs" in line]
    gate, joined, right = heard[2]  # twice the window of 1
    assert len(said) == 1
    assert said[0].startswith(
        f"AdaSim's pairs: the gate is open for {gate:.0%} of the images, {joined:.0%} of the pairs join two, "
        f"{right:.0%} of these of one class, on average nearer than {1 - mean(near):.0%} of that class. "
    )


def best_match(memory: NeighborMemory, image: int) -> int:
    """The image with the largest sum of similarities over the window's lists; -1 is no image."""
    sums: dict[int, float] = {}
    for ids, similarities in zip(
        memory.history_ids[image].tolist(), memory.history_similarities[image].tolist(), strict=True
    ):
        for i, similarity in zip(ids, similarities, strict=True):
            sums[i] = sums.get(i, 0.0) + similarity
    return min((i for i in sums if i >= 0), key=lambda i: (-sums[i], i), default=-1)


@pytest.mark.parametrize("first", [0, 8])
def test_how_near_partners_of_the_class_are(first: int) -> None:
    torch.manual_seed(0)
    memory = NeighborMemory(40, dim=4, window=1, k=3, rows=range(first, 40))
    labels = torch.randint(-1, 2, (40,))
    for image in range(first, 40):
        memory.observe([image], F.normalize(torch.randn(1, 4)))
    partners = torch.randint(0, 40, (40,))
    partners[:20:2] = torch.arange(0, 20, 2)  # these have none
    expected = []
    for i in range(first, 40):
        j, mates = int(partners[i]), [m for m in range(first, 40) if m != i and labels[m] == labels[i]]
        if labels[i] >= 0 and j in mates:
            cosines = {m: float(memory.features([m])[0] @ memory.features([i])[0]) for m in mates}
            expected.append(mean(cosine > cosines[j] for cosine in cosines.values()))
    assert len(expected) > 3
    total, asked = nearer_in_class(memory, partners[first:], labels)
    assert (asked, total) == (len(expected), pytest.approx(sum(expected)))


def test_the_regime_without_partners_or_labels_says_what_cannot_be_told() -> None:
    assert "hardly differ from one with --pairs standard" in regime(0.04, 0.004, 1.0)
    assert "cannot be told without labels" in regime(0.8, 0.3, math.nan)
    assert "30% of the pairs join two, 60% of these of one class. " in regime(0.8, 0.3, 0.88)
    assert "60% of these of one class, on average nearer than 97% of that class. " in regime(
        0.8, 0.3, 0.88, 0.03
    )
