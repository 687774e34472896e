"""The examples run as they stand: loops of one's own and of lightly's, a method, pairs and data of one's own."""

import io
import json
import re
import runpy
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import command, json_lines, refusal
from PIL import Image
from torch.utils.data import TensorDataset

import adasim
from adasim.data import synthetic
from adasim.recipes import get_recipe
from adasim.registry import METHODS, PAIRS, load_plugin
from adasim.util.errors import UserError

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[1] / "examples"
TINY = (
    "--data synthetic:64 --epochs 3 --batch-size 16 --neighbors.window 1 --neighbors.k 3 --device cpu "
    "--save.log-every 1 --no-curves --no-compare"
)


def test_own_loop_is_short_and_bootstraps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("adasim.data.synthetic", lambda count: synthetic(count // 4))  # sooner
    assert len((EXAMPLES / "own_loop.py").read_text().splitlines()) < 60
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    ratios = [int(line.split()[-1].rstrip("%")) for line in capsys.readouterr().out.splitlines()]
    assert ratios[:2] == [0, 0]
    assert ratios[-1] > 0


def test_lightly_s_simsiam_bootstraps_with_our_memory(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("lightly")
    runpy.run_path(str(EXAMPLES / "lightly_simsiam.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(re.findall(r"loss (\S+),", line)[0]) for line in lines]
    ratios = [int(line.split()[-1].rstrip("%")) for line in lines]
    assert losses[-1] < losses[0]
    assert ratios[:2] == [0, 0]  # the window is not full
    assert ratios[-1] > 0


def metrics(run: Path) -> list[dict[str, float]]:
    return json_lines(run / "metrics.jsonl")


def test_a_method_of_ones_own_is_one_file(tmp_path: Path) -> None:
    """Trained from the command line, resumed with more epochs, and its encoder loaded; not a word of it inside."""
    plugin, run = str(EXAMPLES / "own_method.py"), tmp_path / "run"
    command(f"pretrain desk-resnet --plugin {plugin} --method byol {TINY} --byol.momentum 0.9 --out {run}")
    saved = json.loads((run / "config.json").read_text())
    assert saved["method"] == "byol"
    assert saved["byol"] == {"hidden_dim": 512, "out_dim": 128, "momentum": 0.9}
    losses = [line["loss"] for line in metrics(run) if "loss" in line]
    assert losses[-1] < losses[0]
    command(f"pretrain --resume {run} --plugin={plugin} --epochs 4 --no-curves --no-compare")
    assert metrics(run)[-1]["epoch"] == 3
    assert adasim.load_backbone(run).dim == 128
    settings = METHODS["byol"].Settings(momentum=0.95)  # and from Python
    recipe = replace(
        get_recipe("desk-resnet"), method="byol", settings=settings, epochs=1, batch_size=16, pairs="standard"
    )
    again = adasim.pretrain(recipe, tmp_path / "again", data="synthetic:48")
    assert json.loads((again / "config.json").read_text())["byol"]["momentum"] == 0.95


def test_a_pair_policy_of_ones_own_is_one_file(tmp_path: Path) -> None:
    plugin, run = str(EXAMPLES / "own_pairs.py"), tmp_path / "run"
    command(f"pretrain desk-resnet --plugin {plugin} --pairs mutual {TINY} --epochs 6 --out {run}")
    ratios = [line["bootstrap_ratio"] for line in metrics(run) if "bootstrap_ratio" in line]
    assert ratios[0] == 0
    assert ratios[-1] > 0


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """48 images of two classes, and a page that is none."""
    with tarfile.open(tmp_path / "photos.tar", "w") as tar:
        for i, pixels in enumerate(synthetic(48, 16).images):
            buffer = io.BytesIO()
            Image.fromarray(pixels[0].numpy()).save(buffer, "png")
            entry = tarfile.TarInfo(f"class{i % 2}/{i:02d}.png")
            entry.size = buffer.tell()
            buffer.seek(0)
            tar.addfile(entry, buffer)
        entry = tarfile.TarInfo("class0/page.png")
        entry.size = 6
        tar.addfile(entry, io.BytesIO(b"<html>"))
    return tmp_path / "photos.tar"


def test_data_of_ones_own_are_one_file(
    tmp_path: Path, archive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Trained on, labels used, an unreadable one replaced, known again on a resume, and refused when changed."""
    plugin, run = str(EXAMPLES / "own_data.py"), tmp_path / "run"
    data = f"--data tar:{archive} --data.max-unreadable 0.1"
    command(f"pretrain desk-resnet --plugin {plugin} {TINY} {data} --pairs oracle --eval.every 3 --out {run}")
    said = capsys.readouterr().out
    assert f"49 images in 2 classes (class0, class1) from tar:{archive}." in said
    assert f"{archive}:class0/page.png" in (run / "unreadable.csv").read_text()
    assert "knn_top1" in metrics(run)[-1]
    resume = f"pretrain --resume {run} --plugin {plugin} --epochs 4 --no-curves --no-compare"
    command(resume)
    assert "the contents of 49 of 49 images agree" in capsys.readouterr().out
    content = archive.read_bytes()
    archive.write_bytes(content.replace(b"<html>", b"<HTML>"))
    assert "class0/page.png" in refusal(resume, capsys)
    assert adasim.load_run(run).images().labels is not None


def test_data_from_python_are_handed_over_as_the_page_on_extensions_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (EXAMPLES.parent / "docs" / "extending.md").read_text()
    (block,) = [text for text in re.findall(r"```python\n(.*?)```", page, re.S) if "data=pixels" in text]
    recipe = get_recipe("desk-resnet")
    recipe.neighbors.window = 1
    config = replace(recipe, epochs=2, batch_size=16, device="cpu", pairs="standard")
    pixels = synthetic(48, 16).images
    dataset = TensorDataset(pixels.expand(-1, 3, -1, -1), torch.arange(48) % 4)
    names = {"adasim": adasim, "config": config, "longer": replace(config, epochs=3)}
    exec(block, names | {"pixels": pixels, "dataset": dataset})
    assert adasim.load_run("runs/tensor").metrics[-1]["epoch"] == 1
    assert adasim.load_run("runs/dataset").config.epochs == 3


def test_an_unknown_name_points_to_plugins_and_a_name_is_given_once(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"Unknown method 'nothing'.*--plugin FILE"):
        METHODS["nothing"]
    with pytest.raises(UserError, match="No plug-in at"):
        load_plugin(tmp_path / "absent.py")
    with pytest.raises(UserError, match="There is a pair policy 'adasim' already"):
        PAIRS.register("adasim")(object)
