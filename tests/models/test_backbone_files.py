"""A saved encoder loads back, into adasim and into plain timm, and nothing else loads."""

import json
import pickle
import time
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
from adasim.models.files import hash_tensors
from adasim.util.errors import UserError


def build(name="resnet_tiny", size=32, channels=1, **kwargs):
    return build_backbone(ModelConfig(name=name, **kwargs), size, channels, student=True)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_mini", {"patch_size": 4}),
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

    found: dict[str, Any] = {}
    monkeypatch.chdir(tmp_path)
    exec(notes(tmp_path / BACKBONE_FILE)["load"], found)
    assert torch.equal(found["net"].eval()(x), expected)


def notes(path):
    with safetensors.safe_open(path, framework="pt") as file:
        return file.metadata()


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_mini", {"patch_size": 4}),
        ("resnet18", {}),
        ("resnet_tiny", {}),
        ("resnet18", {"small_stem": True}),
    ],
)
def test_timm_builds_the_same_net_from_name_and_kwargs_or_refuses_them(tmp_path, name, kwargs):
    backbone = build(name, **kwargs)
    save_backbone(tmp_path / BACKBONE_FILE, backbone)
    spec = json.loads(notes(tmp_path / BACKBONE_FILE)["adasim"])
    if "stem" in spec["kwargs"]:
        with pytest.raises(TypeError, match="'stem'"):
            timm.create_model(spec["timm"], **spec["kwargs"])
        return
    net = timm.create_model(spec["timm"], **spec["kwargs"])
    net.load_state_dict(safetensors.torch.load_file(tmp_path / BACKBONE_FILE))
    x = torch.randn(4, 1, 32, 32)
    assert torch.equal(net.eval()(x), backbone.eval()(x))


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
    save_backbone(tmp_path / "b.safetensors", loaded)
    assert load_backbone(tmp_path / "b.safetensors").transform == loaded.transform
    save_backbone(tmp_path / "c.safetensors", build(), transform.for_fewshot())
    assert load_backbone(tmp_path / "c.safetensors").transform.squash


def test_a_file_of_an_earlier_version_loads_with_a_warning(tmp_path):
    backbone = build()
    spec = backbone.spec | {"kwargs": dict(backbone.spec["kwargs"]), "stem": backbone.spec["kwargs"]["stem"]}
    del spec["kwargs"]["stem"]
    path = tmp_path / "old.safetensors"
    path.write_bytes(safetensors.torch.save(backbone.net.state_dict(), {"adasim": json.dumps(spec)}))
    with pytest.warns(UserWarning, match=r"encoder\.transform is ImageNet's"):
        loaded = load_backbone(path)
    assert loaded.transform == EvalTransform.of_size(32)
    x = torch.randn(2, 1, 32, 32)
    assert torch.equal(loaded(x), backbone.eval()(x))


@pytest.mark.parametrize(
    "note",
    [
        "[",
        "3",
        "{}",
        '{"mean": 3}',
        "[" * 100_000,
        '{"input_size":[3,32,32],"mean":[1,1,1],"std":[1,1,0],"interpolation":"bicubic","crop_pct":1}',
        '{"input_size":[3,32,32],"mean":[1,1,"1"],"std":[1,1,1],"interpolation":"bicubic","crop_pct":1}',
    ],
)
def test_a_damaged_normalisation_is_refused(tmp_path, note):
    backbone = build()
    path = tmp_path / "b.safetensors"
    header = {"adasim": json.dumps(backbone.spec), "pretrained_cfg": note}
    path.write_bytes(safetensors.torch.save(backbone.net.state_dict(), header))
    with pytest.raises(
        UserError, match=r"b\.safetensors has (a damaged description|an impossible normalisation)"
    ):
        load_backbone(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"No backbone at .*nowhere"):
        load_backbone(tmp_path / "nowhere")
    with pytest.raises(UserError, match=BACKBONE_FILE):
        load_backbone(tmp_path)


def test_a_bit_flipped_anywhere_in_a_file_is_noticed(tmp_path):
    path = tmp_path / "b.safetensors"
    save_backbone(path, build("vit_mini", size=8, patch_size=8))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in [*range(0, header, 23), *range(header, len(whole), len(whole) // 40)]:
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"b\.safetensors is (damaged|not a whole safetensors file)"):
            load_backbone(path)


def test_a_file_whose_second_half_was_zeroed_is_refused_with_the_command_that_writes_it_again(tmp_path):
    path = tmp_path / "my run" / BACKBONE_FILE
    (path.parent / "checkpoints").mkdir(parents=True)
    (path.parent / "config.json").write_text("{}")
    save_backbone(path, build())
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2].ljust(len(data), b"\0"))
    remedy = "To write it again from the newest checkpoint: adasim pretrain --resume"
    for load in (load_backbone, open_encoder, lambda path: read_weights(str(path))):
        for named in (path, path.parent):
            with pytest.raises(UserError) as error:
                load(named)
            assert str(error.value) == f"{path} is damaged: its SHA-256 differs. {remedy} '{path.parent}'"


def test_an_encoder_replaced_by_its_run_while_it_is_read_is_not_taken_for_damaged(tmp_path, monkeypatch):
    path = tmp_path / "b.safetensors"
    save_backbone(path, build())
    newer, from_file = build(), torch.UntypedStorage.from_file

    def meanwhile(
        *arguments, **options
    ):  # by which safetensors opens a file again after it has read the header
        save_backbone(path, newer)
        return from_file(*arguments, **options)

    monkeypatch.setattr(torch.UntypedStorage, "from_file", meanwhile)
    load_backbone(path)


def test_a_damaged_header_in_a_run_is_refused_with_the_command_that_writes_it_again(tmp_path):
    path = tmp_path / BACKBONE_FILE
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    path.write_bytes(bytes(100))
    for named in (path, tmp_path):
        with pytest.raises(UserError, match=r"safetensors is not a whole .* adasim pretrain --resume"):
            open_encoder(named)


def test_equal_encoders_are_equal_files_and_a_file_without_a_checksum_is_read_as_it_is(tmp_path):
    backbone = build()
    save_backbone(tmp_path / "a.safetensors", backbone)
    save_backbone(tmp_path / "b.safetensors", load_backbone(tmp_path / "a.safetensors"))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    older = notes(tmp_path / "a.safetensors")
    del older["sha256"]
    older["adasim"] = json.dumps(backbone.spec)
    (tmp_path / "c.safetensors").write_bytes(safetensors.torch.save(backbone.net.state_dict(), older))
    loaded = load_backbone(tmp_path / "c.safetensors")
    assert hash_tensors(loaded.net.state_dict()) == hash_tensors(backbone.net.state_dict())


@pytest.mark.parametrize("keep", [0, 1, 7, 0.5])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "b.safetensors"
    save_backbone(path, build())
    data = path.read_bytes()
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_backbone(path)


def test_a_hostile_header_is_refused(tmp_path):
    path = tmp_path / "b.safetensors"
    path.write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match="not a whole safetensors file"):
        load_backbone(path)


def test_a_pickle_is_refused_without_being_opened(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "exploded"), "w"))

    path = tmp_path / "b.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError):
        load_backbone(path)
    assert not (tmp_path / "exploded").exists()


def tampered(tmp_path, **changes):
    backbone = build()
    spec = backbone.spec | changes
    path = tmp_path / "b.safetensors"
    path.write_bytes(safetensors.torch.save(backbone.net.state_dict(), {"adasim": json.dumps(spec)}))
    return path


def test_weights_that_do_not_fit_the_description_are_refused(tmp_path):
    kwargs = build().spec["kwargs"] | {"in_chans": 3}
    with pytest.raises(
        UserError, match=r"conv1\.0\.weight has shape \[8, 1, 3, 3\], resnet_tiny needs \[8, 3"
    ):
        load_backbone(tampered(tmp_path, kwargs=kwargs))


def test_a_description_may_not_fetch_or_unpickle(tmp_path):
    kwargs = build().spec["kwargs"] | {"checkpoint_path": "/tmp/x.pth"}
    with pytest.raises(UserError, match="checkpoint_path"):
        load_backbone(tampered(tmp_path, kwargs=kwargs))
    with pytest.raises(UserError, match="hf-hub"):
        load_backbone(tampered(tmp_path, timm="hf-hub:someone/model"))
    with pytest.raises(UserError, match="stem='other' is unknown"):
        load_backbone(tampered(tmp_path, stem="other"))
    with pytest.raises(UserError, match="damaged"):
        load_backbone(tampered(tmp_path, surprise=1))


@pytest.mark.parametrize(
    "changes",
    [
        {"timm": 3},
        {"timm": None},
        {"name": ["x"]},
        {"kwargs": 3},
        {"image_size": "32"},
        {"kwargs": {"num_heads": 0}},
        {"kwargs": {"num_heads": 7}},
        {"kwargs": {"embed_dim": 0}},
        {"kwargs": {"embed_dim": -96}},
        {"kwargs": {"patch_size": 0}},
        {"kwargs": {"img_size": 0}},
        {"kwargs": {"img_size": 10**18}},
        {"kwargs": {"depth": "4"}},
        {"kwargs": {"depth": -1}},
        {"kwargs": {"in_chans": 2.5}},
        {"kwargs": {"layers": [1]}},
        {"kwargs": {"dynamic_img_size": 1}},
    ],
)
def test_an_impossible_description_is_one_sentence(tmp_path, changes):
    backbone = build("vit_mini", patch_size=4)
    if isinstance(changes.get("kwargs"), dict):
        changes = {"kwargs": backbone.spec["kwargs"] | changes["kwargs"]}
    path = tmp_path / "b.safetensors"
    spec = backbone.spec | changes
    path.write_bytes(safetensors.torch.save(backbone.net.state_dict(), {"adasim": json.dumps(spec)}))
    with pytest.raises(UserError, match=r"b\.safetensors .* Copy or export it again"):
        load_backbone(path)


@pytest.mark.parametrize("header", ["[" * 100_000, '{"a":' * 100_000, "", "null"])
def test_a_description_that_is_no_json_of_ours_is_refused(tmp_path, header):
    path = tmp_path / "b.safetensors"
    path.write_bytes(safetensors.torch.save({"w": torch.zeros(2)}, {"adasim": header}))
    with pytest.raises(UserError, match="damaged description of its model"):
        load_backbone(path)


@pytest.mark.parametrize("kwargs", [{"depth": 100_000}, {"embed_dim": 3_000_000}, {"img_size": 4_000_000}])
def test_a_description_larger_than_its_file_is_refused_before_memory_is_taken(tmp_path, kwargs):
    backbone = build("vit_mini", patch_size=4)
    path = tmp_path / "b.safetensors"
    spec = backbone.spec | {"kwargs": backbone.spec["kwargs"] | kwargs}
    path.write_bytes(safetensors.torch.save(backbone.net.state_dict(), {"adasim": json.dumps(spec)}))
    start = time.process_time()
    with pytest.raises(UserError, match="does not fit its own description"):
        load_backbone(path)
    assert time.process_time() - start < 5  # 3,000,000 wide would be 36 million million weights a layer


def test_a_safetensors_file_of_someone_else_says_so(tmp_path):
    path = tmp_path / "b.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="not written by adasim"):
        load_backbone(path)
