"""An exported encoder gives our features under the library that it was written for, from the same image file."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from helpers import command, names, refusal, snapshot
from packaging.version import Version
from PIL import Image
from torch import Tensor

import adasim
from adasim.eval.encoder import Encoder
from adasim.eval.results import read_results
from adasim.models import Backbone, load_backbone, read_weights
from adasim.tools.export import Subject, filled, model_card, transform_file

Make = Callable[..., Path]
REAL = {"timm": "timm", "hf": "transformers", "onnx": "onnxruntime", "pt2": "torch"}
MODELS: dict[str, dict[str, Any]] = {
    "vit": {"model": "vit_mini", "size": 80},  # above 64 pixels: resized to 91, and the centre cut out
    "no_pool": {"model": "resnet_tiny", "size": 16},
    "3x3": {"model": "resnet18", "size": 32, "small_stem": True},
}


@pytest.fixture
def in_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Path], None]]:
    """Work in an export's folder, as its README tells people to, with nothing left behind."""
    before = set(sys.modules)

    def go(folder: Path) -> None:
        if "transformers" in sys.modules:
            modules = str(folder.parent / "modules")
            monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        monkeypatch.chdir(folder)
        monkeypatch.syspath_prepend(str(folder))

    yield go
    for name in set(sys.modules) - before:
        if name in ("transform", "adasim_model") or name.startswith("transformers_modules"):
            del sys.modules[name]


def by_the_card(folder: Path) -> Tensor:
    """What the lines of the model card compute of photo.jpg."""
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)
    known: dict[str, Any] = {}
    with torch.no_grad():
        exec(code, known)
    return torch.as_tensor(known["features"])


@pytest.mark.parametrize(
    ("to", "kind"),
    [
        *(("timm", kind) for kind in MODELS),
        *(("hf", "vit"), ("hf", "3x3")),
        pytest.param("onnx", "vit", marks=pytest.mark.slow),
        pytest.param("pt2", "vit", marks=pytest.mark.slow),
    ],
)
def test_the_model_card_s_lines_give_our_features_of_a_photo(
    to: str, kind: str, make_run: Make, photos: Path, tmp_path: Path, in_folder: Callable[[Path], None]
) -> None:
    pytest.importorskip(REAL[to])
    run = make_run(**MODELS[kind])
    folder = adasim.export(run, to)
    assert folder == tmp_path / f"run-{to}"
    photo = photos / "a" / "04.png"
    Image.open(photo).save(photo, exif=b"garbage!!!!")  # which nobody needs
    (folder / "photo.jpg").write_bytes(photo.read_bytes())
    ours = adasim.embed(run, photos, workers=0, cache=False)
    own = ours.features[ours.files.index("a/04.png")]
    in_folder(folder)
    theirs = by_the_card(folder)[0]
    assert own.abs().max() > 0.01
    assert torch.allclose(own, theirs, atol=1e-4, rtol=0), (own - theirs).abs().max()
    if to in PROGRAMS:
        check_program(folder, load_backbone(run), to)


@pytest.mark.parametrize("kind", [*MODELS, "timm's own"])
@pytest.mark.parametrize("to", ["timm", "hf"])
def test_our_own_commands_read_an_export(
    to: str, kind: str, make_run: Make, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(**MODELS.get(kind, {"model": "convnext_atto", "size": 32}))
    folder = adasim.export(run, to)
    assert "take an encoder as --backbone" in refusal(f"explore {folder}", capsys)
    own = adasim.embed(run, photos, workers=0, cache=False)
    for source in (folder, folder / "model.safetensors"):
        found = adasim.embed(source, photos, workers=0, cache=False)
        assert torch.equal(found.features, own.features)
    again = adasim.export(folder, "timm", tmp_path / "again")
    assert torch.equal(adasim.embed(again, photos, workers=0, cache=False).features, own.features)
    weights = read_weights(str(folder))
    config = json.loads((run / "config.json").read_text())["model"]
    assert weights.model is not None
    assert (weights.model.name, weights.model.small_stem) == (config["name"], config["small_stem"])
    assert weights.transform == load_backbone(run).transform


def onnx_program(folder: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    said = session.get_modelmeta().custom_metadata_map["pretrained_cfg"]
    return lambda pixels: torch.from_numpy(session.run(None, {"pixels": pixels.numpy()})[0]), said


def pt2_program(folder: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    extra = {"pretrained_cfg.json": ""}
    program = torch.export.load(folder / "model.pt2", extra_files=extra)
    return program.module(), extra["pretrained_cfg.json"]


PROGRAMS = {"onnx": onnx_program, "pt2": pt2_program}


def check_program(folder: Path, encoder: Backbone, to: str) -> None:
    """It takes any number of images, and the file says what to do to them."""
    program, said = PROGRAMS[to](folder)
    assert json.loads(said) == encoder.transform.to_timm() | {"crop_mode": "center"}
    for count in (1, 7):
        pixels = torch.randn(count, 3, encoder.transform.size, encoder.transform.size)
        assert torch.allclose(program(pixels), encoder(pixels), atol=1e-4, rtol=0)


@pytest.mark.parametrize("to", ["timm", "hf"])
def test_the_library_s_own_transform_travels_in_the_configuration(
    to: str, make_run: Make, photos: Path
) -> None:
    """To the bit where nothing is resized; PIL rounds a few pixels to the next level where something is."""
    run = make_run(model="vit_mini", size=80)
    encoder = load_backbone(run)
    folder = adasim.export(run, to)
    if to == "timm":
        if Version(timm.__version__) < Version("1.0.29"):
            pytest.skip("this timm takes no .safetensors from a folder")
        net = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
        transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net))
    else:
        transformers = pytest.importorskip("transformers")
        net = transformers.AutoModel.from_pretrained(folder).eval()
        processor = transformers.AutoImageProcessor.from_pretrained(folder)
        transform = lambda image: processor(image)["pixel_values"][0]  # noqa: E731
    photo = Image.open(photos / "a" / "04.png")
    for image, tolerance in [(photo.resize((91, 91)), 1e-4), (photo, 5e-3)]:
        with torch.no_grad():
            own, theirs = encoder(encoder.transform(image)[None]), net(transform(image)[None])
        theirs = theirs if to == "timm" else theirs.pooler_output
        assert torch.allclose(own, theirs, atol=tolerance, rtol=0), (own - theirs).abs().max()


def test_a_squashed_view_travels_too(make_run: Make, photos: Path) -> None:
    encoder = load_backbone(make_run(model="resnet_tiny", size=80))
    encoder.transform = encoder.transform.for_fewshot()
    subject = Subject(encoder, encoder.transform)
    assert subject.metadata["crop_mode"] == "squash"
    known: dict[str, Any] = {}
    exec(transform_file(encoder.transform), known)
    image = Image.open(photos / "a" / "04.png").resize((120, 90))
    assert torch.allclose(known["transform"](image), encoder.transform(image), atol=1e-6)
    card = model_card(Encoder("few", encoder, encoder.transform, "made up"), subject, "timm")
    assert "both sides are resized to 92 pixels" in card


def test_the_card_tells_data_recipe_and_the_figures_of_these_weights_alone(
    make_run: Make, photos: Path, tmp_path: Path
) -> None:
    run, other = make_run(), make_run("other", model="vit_mini", size=32)
    adasim.evaluate(run, "views", data=str(photos), workers=0, no_cache=True)
    adasim.evaluate(other, "views", data=str(photos), workers=0, no_cache=True, results=run / "results.jsonl")
    (figure,) = [f"{result.value:.2f}" for result in read_results(run) if result.model["name"] == "run"]
    card = (adasim.export(run, "timm") / "README.md").read_text()
    assert f"- own views (top-1) on photos: {figure}\n" in card
    assert "are of other weights, and left out here: 1." in card
    for words in (
        "Trained on 12 images of `photos`",
        "by SimSiam",
        "a window of 10 epochs",
        "0 of 100 epochs are complete",
    ):
        assert words in card
    assert str(tmp_path) not in card  # whoever publishes it tells nobody where their photos lie


def test_what_is_there_is_replaced_only_when_asked_and_only_an_export(
    make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = make_run(), tmp_path / "out"
    line = f"export {run} --to timm --out {out}"
    command(line)
    before = snapshot(out)
    assert "is there already. Replace it with --overwrite" in refusal(line, capsys)
    assert snapshot(out) == before
    (out / "adasim_model.py").unlink()
    command(f"{line} --overwrite")
    assert "adasim_model.py" in names(out)
    (out / "thesis.txt").write_text("years of work")
    assert "it holds thesis.txt" in refusal(f"{line} --overwrite", capsys)
    assert (out / "thesis.txt").exists()
    photos = tmp_path / "precious"
    photos.mkdir()
    (photos / "README.md").write_text("my notes")
    assert "is not an export alone" in refusal(f"export {run} --to timm --out {photos} --overwrite", capsys)
    assert names(photos) == ["README.md"]
    assert not [name for name in names(tmp_path) if name.endswith("adasim-tmp")]


@pytest.mark.parametrize("to", ["timm", "hf", "onnx"])
def test_a_net_that_differs_and_a_library_that_is_missing_are_refused_and_nothing_is_left(
    to: str, make_run: Make, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run, before, real = make_run(), set(sys.modules), filled
    monkeypatch.setattr(
        "adasim.tools.export.filled", lambda name, **values: real(name, **values | {"stem": "pass"})
    )
    if to == "onnx":
        pytest.importorskip("onnx")
        monkeypatch.setitem(sys.modules, "onnxscript", None)  # as if it were not installed
    else:
        pytest.importorskip(REAL[to])
    said = refusal(f"export {run} --to {to} --out {tmp_path / 'out'}", capsys)
    assert ("pip install" if to == "onnx" else f"gives other features under {REAL[to]}") in said
    assert not [name for name in names(tmp_path) if name.startswith("out")]
    assert not [name for name in set(sys.modules) - before if "adasim_model" in name or "modeling" in name]


def test_a_plain_file_and_a_loaded_encoder_are_exported_too(
    make_run: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run()
    (run / "encoders").mkdir()
    earlier = shutil.copy(run / "backbone.safetensors", run / "encoders" / "epoch-0030.safetensors")
    folder = adasim.export(earlier, "timm")
    assert folder == tmp_path / "run-epoch-0030-timm"
    assert "As of epoch 30 of 100." in (folder / "README.md").read_text()
    (run / "backbone.safetensors").rename(tmp_path / "mine.safetensors")
    folder = adasim.export(tmp_path / "mine.safetensors", "timm")
    assert folder == tmp_path / "mine-timm"
    assert "No run folder was at hand" in (folder / "README.md").read_text()
    monkeypatch.chdir(tmp_path)
    folder = adasim.export(load_backbone(tmp_path / "mine.safetensors"), "timm")
    assert (tmp_path / folder / "model.safetensors").exists()


@pytest.mark.parametrize("to", ["timm", "hf", "onnx", "pt2"])
def test_a_disk_that_takes_no_more_is_blamed_and_not_the_format(
    to: str, make_run: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if to == "onnx":
        pytest.importorskip("onnxscript")
    run, limits = make_run(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # of any file: as if the disk were full
    try:
        said = refusal(f"export {run} --to {to} --out {tmp_path / 'out'}", capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"Cannot write {tmp_path / 'out'}: File too large. Make it writable" in said
    assert not [name for name in names(tmp_path) if name.startswith("out")]
