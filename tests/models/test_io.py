"""A saved encoder loads back, into adasim and into plain timm, and nothing else loads."""

import json
import pickle
from typing import Any

import pytest
import safetensors
import safetensors.torch
import timm
import torch

from adasim.config import ModelConfig
from adasim.eval.encoder import open_encoder
from adasim.models import (
    BACKBONE_FILE,
    EvalTransform,
    build_backbone,
    load_backbone,
    read_weights,
    save_backbone,
)
from adasim.util.errors import UserError


def build(name="resnet_tiny", size=32, channels=1, **kwargs):
    return build_backbone(ModelConfig(name=name, **kwargs), size, channels, student=True)


def notes(path):
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_mini", {"patch_size": 4}),
        ("resnet18", {}),
        ("resnet18", {"small_stem": True}),
        ("resnet_tiny", {}),
        ("convnext_atto", {}),
    ],
)
def test_round_trip_through_a_run_folder_and_into_plain_timm(tmp_path, monkeypatch, name, kwargs):
    backbone = build(name, **kwargs)
    x = torch.randn(4, 1, 32, 32)
    if name != "convnext_atto":
        backbone.train()(x)  # so that running statistics differ from their start
    save_backbone(tmp_path / BACKBONE_FILE, backbone)
    expected = backbone.eval()(x)

    loaded = load_backbone(tmp_path)
    assert not loaded.training
    assert loaded.spec == backbone.spec
    assert torch.equal(loaded(x), expected)
    save_backbone(tmp_path / "again.safetensors", loaded)
    assert (tmp_path / "again.safetensors").read_bytes() == (tmp_path / BACKBONE_FILE).read_bytes()

    scope: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(notes(tmp_path / BACKBONE_FILE)["load"], scope)
    assert torch.equal(scope["net"].eval()(x), expected)
    spec = json.loads(notes(tmp_path / BACKBONE_FILE)["adasim"])
    if "stem" in spec["kwargs"]:  # timm has no such argument, and must not build another net
        with pytest.raises(TypeError, match="'stem'"):
            timm.create_model(spec["timm"], **spec["kwargs"])


def test_the_transform_travels_with_the_file_under_timms_names(tmp_path):
    transform = EvalTransform.of_size(96, (0.5,), (0.25,)).bilinear()
    save_backbone(tmp_path / "a.safetensors", build(), transform)
    cfg = json.loads(notes(tmp_path / "a.safetensors")["pretrained_cfg"])
    assert cfg["input_size"] == [3, 96, 96]
    assert (cfg["mean"], cfg["std"], cfg["interpolation"]) == ([0.5] * 3, [0.25] * 3, "bilinear")
    assert int(96 / cfg["crop_pct"]) == 110
    loaded = load_backbone(tmp_path / "a.safetensors")
    image = torch.randint(0, 256, (3, 120, 150), dtype=torch.uint8)
    assert torch.equal(loaded.transform(image), transform(image))
    save_backbone(tmp_path / "b.safetensors", build(), transform.for_fewshot())
    assert load_backbone(tmp_path / "b.safetensors").transform.squash


def test_a_bit_flipped_anywhere_in_a_file_is_noticed(tmp_path):
    path = tmp_path / "b.safetensors"
    save_backbone(path, build("vit_mini", size=8, patch_size=8))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    places = [whole.index(note) for note in (b'"adasim"', b'"sha256"', b'"pretrained_cfg"')]
    places = [*(p + 2 for p in places), *range(0, header, 23), *range(header, len(whole), len(whole) // 40)]
    for place in places:
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"b\.safetensors is (damaged|not a whole safetensors file)"):
            load_backbone(path)


@pytest.fixture
def run(tmp_path):
    """A folder that looks like a run, with an encoder."""
    folder = tmp_path / "my run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    save_backbone(folder / BACKBONE_FILE, build())
    return folder


def test_a_file_whose_second_half_was_zeroed_is_refused_with_the_command_that_writes_it_again(run):
    path = run / BACKBONE_FILE
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))
    way_out = "To write it again from the newest checkpoint: adasim pretrain --resume"
    for load in (load_backbone, open_encoder, lambda path: read_weights(str(path))):
        for named in (path, run):
            with pytest.raises(UserError) as error:
                load(named)
            assert str(error.value) == f"{path} is damaged: its SHA-256 differs. {way_out} '{run}'"
    path.write_bytes(bytes(100))
    for named in (path, run):
        with pytest.raises(UserError, match=r"safetensors is not a whole .* adasim pretrain --resume"):
            open_encoder(named)


def test_an_encoder_replaced_by_its_run_while_it_is_read_is_not_taken_for_damaged(tmp_path, monkeypatch):
    path = tmp_path / "b.safetensors"
    save_backbone(path, build())
    newer, from_file = build(), torch.UntypedStorage.from_file

    def meanwhile(*arguments, **options):  # by which safetensors opens a file again after its header
        save_backbone(path, newer)
        return from_file(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", meanwhile)
    load_backbone(path)


def test_a_truncated_file_a_hostile_header_and_a_pickle_are_refused_and_nothing_is_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    path = tmp_path / "b.safetensors"
    save_backbone(path, build())
    truncated = [path.read_bytes()[:length] for length in (0, 1, 7, 5000)]
    for content in (*truncated, (1 << 60).to_bytes(8, "little") + b"{}", pickle.dumps(Bomb())):
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a whole safetensors file"):
            load_backbone(path)
    assert not (tmp_path / "exploded").exists()
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="not written by adasim"):
        load_backbone(path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kwargs": {"checkpoint_path": "/tmp/x.pth"}}, "passes 'checkpoint_path' to timm"),
        ({"kwargs": {"pretrained_cfg": {"url": "x"}}}, "passes 'pretrained_cfg' to timm"),
        ({"timm": "hf-hub:someone/model"}, "holds a 'hf-hub:someone/model', which this timm"),
        ({"timm": "resnet_of_tomorrow"}, "which this timm"),
        ({"kwargs": {"in_chans": 3}}, "does not fit resnet18 of this timm .*conv1"),
        ({"kwargs": {"img_size": 32}}, "does not fit resnet18 of this timm .*img_size"),
    ],
)
def test_a_description_may_not_fetch_or_unpickle_and_must_fit_its_weights(tmp_path, changes, words):
    """Such files are whole: somebody else's, or of another timm."""
    backbone = build()
    kwargs = backbone.spec["kwargs"] | changes.get("kwargs", {})
    backbone.spec = backbone.spec | changes | {"kwargs": kwargs}
    save_backbone(tmp_path / "b.safetensors", backbone)
    with pytest.raises(UserError, match=words):
        load_backbone(tmp_path / "b.safetensors")
