"""A saved encoder loads back, into adasim and into plain timm, and nothing else loads."""

import json
import pickle

import pytest
import safetensors
import safetensors.torch
import timm
import torch
from torch import nn

from adasim.config import ModelConfig
from adasim.errors import UserError
from adasim.models import BACKBONE_FILE, build_backbone, load_backbone, save_backbone


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
def test_round_trip_through_a_run_folder_and_into_plain_timm(tmp_path, name, kwargs):
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

    path = tmp_path / BACKBONE_FILE
    with safetensors.safe_open(path, framework="pt") as file:
        spec = json.loads(file.metadata()["adasim"])
    net = timm.create_model(spec["timm"], **spec["kwargs"])  # the lines of the module's docstring
    if spec["stem"] != "timm":
        net.maxpool = nn.Identity()
    if spec["stem"] == "3x3":
        net.conv1 = nn.Conv2d(net.in_chans, net.bn1.num_features, 3, 1, 1, bias=False)
    net.load_state_dict(safetensors.torch.load_file(path))
    assert torch.equal(net.eval()(x), expected)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"No backbone at .*nowhere"):
        load_backbone(tmp_path / "nowhere")
    with pytest.raises(UserError, match=BACKBONE_FILE):
        load_backbone(tmp_path)


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
    with pytest.raises(UserError, match="stem 'other'"):
        load_backbone(tampered(tmp_path, stem="other"))
    with pytest.raises(UserError, match="damaged"):
        load_backbone(tampered(tmp_path, surprise=1))


def test_a_safetensors_file_of_someone_else_says_so(tmp_path):
    path = tmp_path / "b.safetensors"
    safetensors.torch.save_file({"w": torch.zeros(2)}, path)
    with pytest.raises(UserError, match="not written by adasim"):
        load_backbone(path)
