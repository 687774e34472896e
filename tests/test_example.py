"""The examples run as they stand: a loop of one's own, a method and a pair policy of one's own."""

import json
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

import adasim
from adasim.cli.main import main
from adasim.errors import UserError
from adasim.recipes import get_recipe
from adasim.registry import METHODS, PAIRS, load_plugin

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = [
    *("--data", "embedded:64", "--epochs", "3", "--batch-size", "16", "--neighbors.window", "1"),
    *("--neighbors.k", "3", "--device", "cpu", "--save.log-every", "1"),
]


def test_own_loop_is_short_and_bootstraps(capsys: pytest.CaptureFixture[str]) -> None:
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) < 60
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    ratios = [int(line.split()[-1].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert ratios[:2] == [0, 0]
    assert ratios[-1] > 0


def metrics(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("pairs", ["adasim", "nearest"])
def test_a_method_of_ones_own_is_one_file(tmp_path: Path, pairs: str) -> None:
    """Trained from the command line, resumed with more epochs, and its encoder loaded; not a word of it inside."""
    plugin, run = str(EXAMPLES / "own_method.py"), tmp_path / "run"
    words = ["pretrain", "desk-resnet", "--plugin", plugin, "--method", "byol", *TINY, "--pairs", pairs]
    main([*words, "--byol.momentum", "0.9", "--out", str(run)])
    saved = json.loads((run / "config.json").read_text())
    assert saved["method"] == "byol"
    assert saved["byol"] == {"hidden_dim": 512, "out_dim": 128, "momentum": 0.9}
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert losses[-1] < losses[0]
    main(["pretrain", "--resume", str(run), f"--plugin={plugin}", "--epochs", "4"])
    assert metrics(run)[-1]["epoch"] == 3
    assert adasim.load_backbone(run).dim == 128


def test_a_method_of_ones_own_trains_from_python(tmp_path: Path) -> None:
    load_plugin(EXAMPLES / "own_method.py")
    settings = METHODS["byol"].Settings(momentum=0.95)
    recipe = get_recipe("desk-resnet")
    recipe.data.source, recipe.neighbors.window = "embedded:48", 1
    config = replace(recipe, method="byol", settings=settings, epochs=2, batch_size=16, device="cpu")
    run = adasim.pretrain(config, tmp_path / "run")
    assert json.loads((run / "config.json").read_text())["byol"]["momentum"] == 0.95
    assert adasim.load_backbone(run).dim == 128


def test_a_pair_policy_of_ones_own_is_one_file(tmp_path: Path) -> None:
    plugin, run = str(EXAMPLES / "own_pairs.py"), tmp_path / "run"
    main(["pretrain", "desk-resnet", "--plugin", plugin, "--pairs", "mutual", *TINY, "--out", str(run)])
    ratios = [line["bootstrap_ratio"] for line in metrics(run) if "bootstrap_ratio" in line]
    assert ratios[0] == 0
    assert ratios[-1] > 0


def test_an_unknown_name_points_to_plugins(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown method 'nothing'.*--plugin FILE"):
        METHODS["nothing"]
    with pytest.raises(UserError, match="No plug-in at"):
        load_plugin(tmp_path / "absent.py")


def test_a_name_is_given_once() -> None:
    class Other:
        pass

    with pytest.raises(UserError, match="There is a pair policy 'adasim' already"):
        PAIRS.register("adasim")(Other)
