"""What can be refused without torch is refused at once: importing it takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import refusal

from adasim.cli.options import nearest_options
from adasim.registry import EVALUATIONS, METHODS, PAIRS, SOURCES

LONG = "x" * 5000
REFUSED = {
    "pretrian": "Unknown command 'pretrian'. Did you mean pretrain?",
    "pretrain desk-resent": "Unknown recipe 'desk-resent'. Did you mean desk-resnet?",
    "pretrain images --out x": "adasim pretrain photos --data images",
    "pretrain no/images": "adasim pretrain photos --data no/images",
    "pretrain demo --pairs nearst": "Did you mean nearest?",
    "pretrain demo --gpu 0": "There is no option --gpu. Did you mean --device?",
    "pretrain demo --lr 0.1": "Did you mean --optim.lr?",
    "pretrain demo --simsiam.proj-dims 5": "Did you mean --simsiam.proj-dim?",
    "pretrain demo more": "'more'",
    "pretrain demo --epochs 0": "epochs=0 must be at least 1",
    "pretrain demo --epochs five": "--epochs five: not a whole number. `adasim pretrain demo --help`",
    "pretrain demo --micro_batch=some": "--micro_batch some: not a whole number or auto.",
    "pretrain demo --views.scale 0.1 --epochs 5": "--views.scale 0.1: not 2 numbers.",
    "pretrain demo --views.std 0.2 b": "--views.std 0.2 b: not a list of numbers.",
    "pretrain demo --views.mean 1e30": "views.mean=1e+30 must be between 0 and 1",
    "pretrain demo --method dino --dino.student-temp 1e309": "dino.student_temp=inf is not finite.",
    "pretrain demo --data nowhere": "No such folder: nowhere. Check --data.",
    "pretrain demo --data nowhere.npz": "No such file: nowhere.npz. Check --data.",
    "pretrain demo --exclude no.csv": "No such file: no.csv. Check --exclude.",
    "pretrain demo --model.init no/where": "No backbone at no/where",
    "pretrain demo --model.init {file} --gpu 0": "Did you mean --device?",
    "pretrain demo --out {run}": "already holds another run",
    "pretrain demo --out caf\udce9": "--out caf\\xe9 is not UTF-8",
    "pretrain --resume": "--resume needs the folder",
    "pretrain --resume {images}": "not the folder of a run",
    "pretrain --resume {run} --resume {images}": "--resume names two runs",
    "pretrain photos --data nowhere": "No such folder: nowhere",
    "pretrain photos --data {images}": "Add --yes.",
    "pretrain photos --data {images} --out {run} --yes": "already holds another run",
    "pretrain photos --data {images} --hours inf": "--hours=inf is not finite.",
    "demo --out {run}": "already holds another run",
    "demo --seed": "--seed needs a whole number.",
    "demo --epochs 1": "--epochs=1 must be at least 2",
    "plan desk-resent": "Unknown recipe",
    "plan photos --data x": "adasim pretrain photos --data DIR",
    "plan demo --data nowhere": "No such folder: nowhere",
    "plan --imagse 5": "Did you mean --images?",
    "eval nkn {run}": "Unknown evaluation 'nkn'. Did you mean knn?",
    "eval table nowhere": "No such file: nowhere",
    "eval knn no/where": "No backbone at no/where",
    "eval knn resnet18": "Which images?",
    "eval linear {run} --test nowhere": "No such folder: nowhere. Check --test.",
    "eval linear {run} --rates 0.1 nan": "rates=nan is not finite.",
    "eval fewshot {run} --data {images} nowhere": "No such folder: nowhere. Check --data.",
    "eval segmentation {run} --exclude no.csv": "No such file: no.csv. Check --exclude.",
    "embed {run} --out x.npz": "`adasim embed` needs MODEL, --data, --out.",
    "embed {run} --data {images} --out {file}": ".npz, .parquet or .npy",
    "embed no.safetensors --data {images} --out x.npz": "No backbone at no.safetensors",
    "embed {run} --data {images} --out x.npz --exclude no.csv": "No such file: no.csv. Check --exclude.",
    "similar {run} no.jpg --in {images}": "No such file: no.jpg",
    "similar {run} {file} --in nowhere": "No such folder: nowhere. Check --in.",
    "similar {run} {file} --in {images} --out {picture}": "is there already",
    "export {run} --to tim": "--to tim: not one of timm, hf, onnx, pt2.",
    "export {run} --to timm --out {images}": "is not an export alone",
    "export {run} --to pt2": "is not an export alone",
    "export no/where --to onnx": "No backbone at no/where",
    "explore nowhere": "nowhere is not the folder of a run",
    "explore --backbone resnet18 --data nowhere": "No such folder: nowhere",
    "explore --features no.npz --data {images}": "No such file: no.npz. Check --features.",
    "explore --features {file} --data {images} --passes 3": "--passes changes nothing beside --features",
    "explore {run} --out {file}": ".html",
    "gallery {run} --out {picture}": "is there already",
    "gallery {run} --backbone resnet18": "one of them alone",
    "gallery {run} --format gif": "--format gif: not some of png, pdf.",
    "gallery {run} --tau 1e-320": "--tau=1e-320 must be at least 1e-06.",
    "plot nowhere": "nowhere is not the folder of a run",
    "plot {run} --out {picture}": "is no figure",
    **dict.fromkeys(
        (
            "gallery --features {pipe} --data {images}",
            "embed {pipe} --data {images} --out x.npz",
            "embed resnet18:/dev/zero --data {images} --out x.npz",
            "pretrain demo --model.init {pipe}",
            "pretrain demo --exclude /dev/zero",
        ),
        "is a pipe or a device.",
    ),
    **dict.fromkeys(
        (
            f"pretrain --resume {LONG}",
            f"pretrain demo --out {LONG}",
            f"pretrain demo --model.init {LONG}",
            f"embed {LONG} --data {{images}} --out x.npz",
        ),
        "No file has a name as long as",
    ),
}
"""What is typed after `adasim`, and what is said."""
HELP = [
    *("pretrain", "pretrain demo -h", "pretrain demo --help", "eval", "eval linear --help"),
    *("explore --help", "apply --help", "embed --help", "similar --help", "export --help"),
]

RUN_ALL = """
import contextlib, io, json, sys, time
sys.stdin = None  # as after `<&-`
from adasim.cli.main import main
for words in json.loads(sys.argv[1]):
    said, code = io.StringIO(), 0
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            main(words)
        except SystemExit as stop:
            code = stop.code
    slow = [name for name in ("torch", "timm", "torchvision", "numpy") if name in sys.modules]
    print(json.dumps([code, said.getvalue(), slow]))
    if slow:
        break
"""


def run_all(commands: list[list[str]], folder: Path) -> list[tuple[int, str, list[str]]]:
    """Exit code, standard error and the slow libraries that were imported so far, for each in one process."""
    command = [sys.executable, "-c", RUN_ALL, json.dumps(commands)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_refusals_and_help_do_not_import_torch(tmp_path: Path) -> None:
    places = {name: tmp_path / name for name in ("run", "images", "file", "picture.png")}
    for folder in ("run", "images", "run-pt2"):
        (tmp_path / folder).mkdir()
    in_run = ("run/config.json", "run/versions.json", "run/run.json")
    for file in (*in_run, "run-pt2/mine", "images/a.jpg", "file", "picture.png", "picture.csv"):
        (tmp_path / file).write_text("{}")
    places["pipe"] = tmp_path / "pipe"
    os.mkfifo(places["pipe"])
    names = {name.partition(".")[0]: str(path) for name, path in places.items()}
    typed = [words.format(**names).split() for words in (*REFUSED, *HELP)]
    found = run_all(typed, tmp_path)
    for (words, expected), (code, said, slow) in zip(REFUSED.items(), found, strict=False):
        assert expected in " ".join(said.split()), words
        assert (code, said.count("\n"), slow) == (2, 1, []), words
    for words, (code, said, slow) in zip(HELP, found[len(REFUSED) :], strict=True):
        assert (code, said, slow) == (0, "", []), words


@pytest.mark.parametrize("registry", [METHODS, PAIRS, SOURCES, EVALUATIONS], ids=lambda one: one.kind)
def test_what_is_told_of_built_in_things_before_they_are_imported_is_true(registry: object) -> None:
    assert isinstance(registry, type(METHODS))
    for name in registry._built_in:
        thing, outline = registry[name], registry.outline(name)
        if registry in (METHODS, PAIRS):
            assert thing.Settings is outline.Settings
            assert getattr(thing, "VIEWS", {}) == outline.VIEWS
        if registry is EVALUATIONS:
            assert issubclass(thing, outline)
    at_home = {
        name for name, thing in registry._things.items() if thing.__module__.startswith(registry._home)
    }
    assert at_home == set(registry._built_in)


def test_an_option_that_resembles_none_gets_no_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(["pretrain", "demo", "--xyzzy"], capsys)
    assert said == "adasim: There is no option --xyzzy. `adasim pretrain demo --help` lists all.\n"
    assert nearest_options("--name", ["--model.name", "--optim.name", "--out"]) == [
        "--model.name",
        "--optim.name",
    ]
