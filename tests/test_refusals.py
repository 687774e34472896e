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
    "pretrian": "Unknown command 'pretrian'",
    "pretrain desk-resent": "Unknown recipe 'desk-resent'",
    "pretrain demo --pairs nearst": "pairs='nearst' is unknown. Did you mean nearest?",
    "pretrain demo --method dion": "method='dion' is unknown. Did you mean dino?",
    "pretrain demo --gpu 0": "There is no option --gpu. Did you mean --device?",
    "pretrain demo --lr 0.1": "There is no option --lr. Did you mean --optim.lr?",
    "pretrain demo --epoch=5": "There is no option --epoch. Did you mean --epochs?",
    "pretrain demo --simsiam.proj-dims 5": "Did you mean --simsiam.proj-dim?",
    "pretrain demo more": "Nothing is known to do with 'more'",
    "pretrain demo --epochs 0": "epochs=0 must be at least 1",
    "pretrain demo --data nowhere": "No such folder: nowhere. Check --data.",
    "pretrain demo --data nowhere.npz": "No such file: nowhere.npz. Check --data.",
    "pretrain demo --exclude no.csv": "No such file: no.csv. Check --exclude.",
    "pretrain demo --model.init no/where": "No backbone at no/where",
    "pretrain demo --model.init {file} --gpu 0": "There is no option --gpu. Did you mean --device?",
    "pretrain demo --out {run}": "already holds another run",
    "pretrain --resume": "--resume needs the folder",
    "pretrain --resume {images}": "not the folder of a run",
    "pretrain --resume nowhere": "nowhere is not the folder of a run: there is no such folder",
    "pretrain photos --data nowhere": "No such folder: nowhere",
    "pretrain photos --data {images} --out {run} --yes": "already holds another run",
    "pretrain photos --data {images} --epoch 5": "There is no option --epoch. Did you mean --epochs?",
    "demo --out {run}": "already holds another run",
    "demo --epoch 5": "There is no option --epoch. Did you mean --epochs?",
    "plan desk-resent": "Unknown recipe",
    "plan photos --data x": "adasim pretrain photos --data DIR shows it",
    "plan demo --data nowhere": "No such folder: nowhere",
    "plan demo --model.init no/where": "No backbone at no/where",
    "plan --imagse 5": "Did you mean --images?",
    "eval nkn {run}": "Unknown evaluation 'nkn'. Did you mean knn?",
    "eval table nowhere": "No such file: nowhere",
    "eval knn {run} --kk 5": "There is no option --kk.",
    "eval knn no/where": "No backbone at no/where",
    "eval knn resnet18": "Which images? resnet18 is no run",
    "eval linear {run} --test nowhere": "No such folder: nowhere. Check --test.",
    "eval fewshot {run} --data {images} nowhere": "No such folder: nowhere. Check --data.",
    "eval segmentation {run} --exclude no.csv": "No such file: no.csv. Check --exclude.",
    "eval views {run} --quieries 5": "Did you mean --queries?",
    "embed {run} --data nowhere --out x.npz": "No such folder: nowhere",
    "embed {run} --data {images} --out {file}": "must end in .npz, .parquet or .npy",
    "embed no.safetensors --data {images} --out x.npz": "No backbone at no.safetensors",
    "embed {run} --data {images} --out x.npz --splitt test": "Did you mean --split?",
    "embed {run} --data {images} --out x.npz --exclude no.csv": "No such file: no.csv. Check --exclude.",
    "similar {run} {file} --in {images} --exclude no.csv": "No such file: no.csv. Check --exclude.",
    "similar {run} no.jpg --in {images}": "No such file: no.jpg",
    "similar {run} {file} --in nowhere": "No such folder: nowhere. Check --in.",
    "similar {run} {file} --in {images} --out {picture}": "is there already",
    "export {run} --to timm --out {images}": "is there already and is not an export alone",
    "export {run} --to pt2": "is there already and is not an export alone",
    "export no/where --to onnx": "No backbone at no/where",
    "explore nowhere": "nowhere is not the folder of a run",
    "explore --backbone resnet18 --data nowhere": "No such folder: nowhere",
    "explore --features no.npz --data {images}": "No such file: no.npz. Check --features.",
    "explore {run} --out {file}": "let it end in .html",
    "explore {run} --pases 3": "Did you mean --passes?",
    "gallery nowhere": "nowhere is not the folder of a run",
    "gallery {run} --out {picture}": "is there already",
    "gallery {run} --backbone resnet18": "one of them alone",
    "plot nowhere": "nowhere is not the folder of a run",
    "plot {run} --out {picture}": "is no figure of adasim plot",
    "export {run} --to tim": "--to tim: not one of timm, hf, onnx, pt2. `adasim export --help` says more.",
    "embed {run} --out x.npz": "Something is missing: `adasim embed` needs MODEL, --data, --out.",
    "gallery {run} --format gif": "--format gif: not some of png, pdf.",
    "demo --seed x": "--seed x: not a whole number.",
    "demo --seed": "--seed needs a whole number.",
    "pretrain demo --epochs five": "--epochs five: not a whole number. `adasim pretrain demo --help` says more.",
    "pretrain demo --micro_batch=some": "--micro_batch some: not a whole number or auto.",
    "pretrain demo --views.scale 0.1 --epochs 5": "--views.scale 0.1: not 2 numbers.",
    "pretrain demo --views.std 0.2 b": "--views.std 0.2 b: not a list of numbers.",
    "pretrain demo --views.std inf": "views.std=inf is not finite.",
    "pretrain demo --views.mean 1e30": "views.mean=1e+30 must be between 0 and 1",
    "pretrain demo --method dino --dino.student-temp 1e309": "dino.student_temp=inf is not finite.",
    "pretrain photos --data {images} --hours inf": "--hours=inf is not finite.",
    "pretrain --resume {run} --resume {images}": "--resume names two runs",
    "eval linear {run} --rates 0.1 nan": "rates=nan is not finite.",
    "explore --features {file} --data {images} --passes 3": "--passes changes nothing beside --features",
    "explore --features {file} --data {images} --seed 3": "--seed changes nothing beside --features",
    "gallery --features {file} --data {images} --device cpu": "--device changes nothing beside --features",
    "gallery {run} --tau 1e-320": "--tau=1e-320 must be at least 1e-06.",
    "pretrain demo --neighbors.tau 1e-320": "must be 0 (standard pairs), or 1e-6 or more",
    "pretrain demo --views.size 2147483648": "views.size=2147483648 must be between 8 and 16384",
    "pretrain demo --method dino --dino.out-dim 2147483648": "must be between 2 and 1048576",
    "gallery --features {pipe} --data {images}": "pipe is a pipe or a device.",
    "embed {pipe} --data {images} --out x.npz": "pipe is a pipe or a device.",
    "embed resnet18:/dev/zero --data {images} --out x.npz": "/dev/zero is a pipe or a device.",
    "pretrain demo --model.init {pipe}": "pipe is a pipe or a device.",
    "pretrain demo --exclude /dev/zero": "/dev/zero is a pipe or a device. Name a file",
    "similar {run} {file} --in {images} --exclude {pipe}": "pipe is a pipe or a device.",
    "pretrain demo --out caf\udce9": "--out caf\\xe9 is not UTF-8",
    "pretrain photos --data {images}": "nobody can answer here. Add --yes.",
    **{
        words: "No file has a name as long as"
        for words in (
            f"pretrain --resume {LONG}",
            f"pretrain demo --out {LONG}",
            f"pretrain demo --model.init {LONG}",
            f"plot {LONG}",
            f"embed {LONG} --data {{images}} --out x.npz",
            f"similar {{run}} {LONG} --in {{images}}",
        )
    },
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
