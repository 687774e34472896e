"""A checkpoint is whole or it is not used: kills, damage, hostile files, full disks, retention."""

import itertools
import json
import os
import pickle
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import flip, forked, names, small_disk, snapshot
from torch import Tensor

from adasim.runs import checkpoint as module
from adasim.runs.checkpoint import (
    Checkpoint,
    CheckpointStore,
    InvalidCheckpoint,
    SaveFailed,
    load_optimizer,
    optimizer_tensors,
    seal,
    unseal,
)
from adasim.util.errors import UserError
from adasim.util.files import TEMPORARY, remove_leftovers, sha256_file


def state(step: int) -> dict[str, dict[str, Tensor]]:
    """A state that differs from step to step in every file."""
    return {
        "student": {"w": torch.arange(12.0).reshape(3, 4) + step, "b": torch.full((3,), float(step))},
        "teacher": {"w": torch.arange(12.0) * step},
    }


def save(store: CheckpointStore, step: int, history: list[str] | None = None) -> Path:
    return store.save(step, state(step), {"step": step}, history or [])


def newest(store: CheckpointStore) -> Checkpoint:
    checkpoint = store.load_latest()
    assert checkpoint is not None
    return checkpoint


def assert_is(store: CheckpointStore, step: int) -> None:
    """The newest usable checkpoint is this step's, with exactly this step's state."""
    checkpoint = newest(store)
    assert (checkpoint.step, checkpoint.info) == (step, {"step": step})
    for group, tensors in state(step).items():
        loaded = checkpoint.tensors(group)
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)


# Round trips


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_every_type_and_shape_comes_back_bit_by_bit(tmp_path: Path, dtype: str) -> None:
    values = torch.tensor([0, 1, 1, 0, 1, 1], dtype=getattr(torch, dtype))
    tensors = {
        "vector": values,
        "tied": values,
        "scalar": values[1].clone(),
        "empty": values[:0].clone(),
        "strided": values.reshape(2, 3).clone().t(),
        "channels_last": values.reshape(1, 3, 2, 1).clone().to(memory_format=torch.channels_last),
    }
    store = CheckpointStore(tmp_path, 1)
    store.save(1, {"g": tensors, "none": {}}, {}, [])
    assert newest(store).tensors("none") == {}
    loaded = newest(store).tensors("g")
    for name, tensor in tensors.items():
        assert loaded[name].dtype == tensor.dtype
        assert loaded[name].shape == tensor.shape
        assert torch.equal(loaded[name], tensor)


def test_special_floats_and_python_scalars_come_back_exactly(tmp_path: Path) -> None:
    special = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45, 3.4e38])
    info = {"lr": 0.1 + 0.2, "big": 2**70, "none": None, "flag": True, "text": "ä\n", "l": [float("inf")]}
    store = CheckpointStore(tmp_path, 1)
    store.save(0, {"g": {"x": special}}, info, [])
    assert newest(store).info == info
    assert newest(store).tensors("g")["x"].view(torch.int32).equal(special.view(torch.int32))


def test_a_second_save_at_one_step_supersedes_the_first_without_replacing_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for attempt in range(3):
        store.save(7, {"g": {"x": torch.tensor(attempt)}}, {"attempt": attempt}, [])
    assert newest(store).info == {"attempt": 2}
    assert names(tmp_path / "checkpoints") == ["step-000000007.1", "step-000000007.2"]


# Retention and history


def test_the_newest_are_kept_in_order_of_steps(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in (9, 10, 99, 1_000_000_000, 10_000_000_000):
        save(store, step)
    assert names(tmp_path / "checkpoints") == ["step-1000000000", "step-10000000000"]
    assert_is(store, 10_000_000_000)


@pytest.mark.parametrize(
    ("damaged", "left"), [((1, 2, 3), (1, 2, 3)), ((3,), (1, 2)), ((2, 3), (1,)), ((), (2, 3))]
)
def test_retention_never_deletes_the_last_valid_one_under_newer_invalid_ones(
    tmp_path: Path, damaged: tuple[int, ...], left: tuple[int, ...]
) -> None:
    """Invalid ones do not count among those that are kept, and without a valid one all stay."""
    store = CheckpointStore(tmp_path, 3)
    paths = {step: save(store, step) for step in (1, 2, 3)}
    for step in damaged:
        flip(paths[step] / "student.safetensors")
    CheckpointStore(tmp_path, 2)._retain()
    assert names(tmp_path / "checkpoints") == [paths[step].name for step in left]


def test_history_is_written_once_however_often_an_epoch_ends_and_again_if_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    lists = {"ids": torch.arange(6, dtype=torch.int32), "similarities": torch.rand(6).half()}
    name = store.write_history(4, lists)
    before = (tmp_path / "history" / name).stat()
    assert CheckpointStore(tmp_path, 2).write_history(4, lists) == name  # as after a kill and a resume
    after = (tmp_path / "history" / name).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    flip(tmp_path / "history" / name)
    assert store.write_history(4, lists) == name
    assert names(tmp_path / "history") == [name]
    save(store, 5, [name])
    assert newest(store).history == (name,)
    loaded = newest(store).history_tensors(name)
    assert all(loaded[key].equal(lists[key]) for key in lists)


def test_history_that_no_kept_checkpoint_names_is_pruned(tmp_path: Path) -> None:
    store, window = CheckpointStore(tmp_path, 2), 3
    written: list[str] = []
    for epoch in range(6):
        written.append(store.write_history(epoch, {"x": torch.tensor([epoch])}))
        save(store, epoch + 1, written[-window:])
    # The kept checkpoints end epochs 4 and 5; together they look back on epochs 2..5.
    assert names(tmp_path / "history") == sorted(written[2:])
    assert_is(store, 6)
    flip(tmp_path / "history" / written[5])
    assert_is(CheckpointStore(tmp_path, 2), 5)


# Damage


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A forger's work: change the manifest and make its own hash agree again."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["sha256"]
    change(manifest)
    (folder / "manifest.json").write_bytes(seal(manifest))


def entry(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": sha256_file(path)}


def forge(content: bytes) -> Callable[[Path], None]:
    """Replace a file and let the manifest vouch for it."""

    def damage(folder: Path) -> None:
        path = folder / "student.safetensors"
        path.write_bytes(content)
        rewrite(folder, lambda m: m["groups"].update(student=entry(path)))

    return damage


def outside(folder: Path) -> Path:
    """A file beside the run's own, which exists and whose size and hash agree."""
    path = folder.parent.parent / "outside.safetensors"
    path.write_bytes((folder / "student.safetensors").read_bytes())
    return path


def escape(name: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = outside(folder)
        rewrite(folder, lambda m: m["groups"].update({name.format(path.with_suffix("")): entry(path)}))

    return damage


def escaping_history(folder: Path) -> None:
    path = outside(folder)
    rewrite(folder, lambda m: m["history"].append({"name": "../outside.safetensors", **entry(path)}))


def link_out(folder: Path) -> None:
    path = folder / "student.safetensors"
    path.rename(folder.parent.parent / "elsewhere")
    path.symlink_to(folder.parent.parent / "elsewhere")


def pipe(folder: Path) -> None:
    (folder / "student.safetensors").unlink()
    os.mkfifo(folder / "student.safetensors")  # opening it would wait for ever


def cut(name: str, share: float) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, int((folder / name).stat().st_size * share))


def put(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return damage


class Bomb:
    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, ("touch BOMB_WENT_OFF",)


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


STUDENT, MANIFEST = "student.safetensors", "manifest.json"
DAMAGE: dict[str, Callable[[Path], None]] = {
    "truncated to half": cut(STUDENT, 0.5),
    "a file missing": lambda folder: (folder / "teacher.safetensors").unlink(),
    "no manifest": lambda folder: (folder / MANIFEST).unlink(),
    "manifest is a list": put(MANIFEST, b"[]"),
    "manifest of nested lists": put(MANIFEST, b"[" * 100_000),
    "manifest of another step": lambda folder: rewrite(folder, lambda m: m.update(step=1)),
    "pickle as payload": put(STUDENT, pickle.dumps(Bomb())),
    "pickle as manifest": put(MANIFEST, pickle.dumps(Bomb())),
    "pickle vouched for": forge(pickle.dumps(Bomb())),
    "header longer than the file": forge(header(b"{}", 2**63)),
    "header that is not JSON": forge(header(b"\xff" * 16)),
    "header with offsets beyond the file": forge(
        header(b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}') + b"\0" * 8
    ),
    "header with a shape that overflows": forge(
        header(b'{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}')
    ),
    "../ in the manifest": escape("../../outside"),
    "absolute path in the manifest": escape("{}"),
    "../ in the history": escaping_history,
    "link to elsewhere": link_out,
    "pipe instead of a file": pipe,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_or_hostile_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], None]
) -> None:
    monkeypatch.chdir(tmp_path)  # where the bomb would go off
    said: list[str] = []
    store = CheckpointStore(tmp_path, 2, said.append)
    save(store, 1)
    damage(save(store, 2))
    before = snapshot(tmp_path)
    assert_is(CheckpointStore(tmp_path, 2, said.append), 1)
    assert len(said) == 1
    assert "step-000000002 is not usable" in said[0]
    assert "Going back to step-000000001" in said[0]
    assert snapshot(tmp_path) == before


def test_no_flipped_bit_and_no_cut_in_a_manifest_changes_what_it_says(tmp_path: Path) -> None:
    """Every byte and every length: it is refused, or it still says the same (`1e5` as `1E5`)."""
    store = CheckpointStore(tmp_path, 1)
    name = store.write_history(0, {"x": torch.arange(3)})
    path = save(store, 1, [name]) / "manifest.json"
    said, content = unseal(path), path.read_bytes()
    broken = [content[:size] for size in range(len(content))]
    for place in range(len(content)):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        broken.append(bytes(flipped))
    for candidate in broken:
        path.write_bytes(candidate)
        try:
            assert unseal(path) == said
        except InvalidCheckpoint:
            continue
        assert candidate.lower() == content.lower()


@pytest.mark.parametrize("place", [0, 9, 40, -1], ids=["length", "header", "end of header", "payload"])
def test_a_bit_flipped_anywhere_in_a_tensor_file_is_noticed(tmp_path: Path, place: int) -> None:
    store = CheckpointStore(tmp_path, 2)
    save(store, 1)
    path = save(store, 2) / "teacher.safetensors"
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    status = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # a failing disk leaves no date
    assert_is(store, 1)


def test_with_no_usable_checkpoint_left_the_run_is_not_silently_restarted(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 2)
    for step in (1, 2):
        flip(save(store, step) / "student.safetensors")
    with pytest.raises(UserError, match=r"No usable checkpoint .*step-000000002 is not usable: .*SHA-256"):
        store.load_latest()


def test_foreign_files_among_the_checkpoints_are_ignored(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    for name in ("step-2", "step-000000009.pt", "notes.txt", f"step-000000008.1-1{TEMPORARY}"):
        (tmp_path / "checkpoints" / name).write_bytes(pickle.dumps(Bomb()))
    assert_is(store, 1)


# Kills


def killed_at(point: int, folder: Path) -> int:
    """End an epoch and save in another process, which dies at this call that touches the disk; its exit code."""
    calls = itertools.count(1)

    def killing(real: Callable[..., Any], halfway: Callable[..., None] | None = None) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == point:
                if halfway:
                    halfway(*args)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    def half_a_file(tensors: dict[str, Tensor], path: Path) -> None:
        save_file(tensors, path)
        os.truncate(path, os.path.getsize(path) // 2)

    def work() -> None:
        for name in ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir", "chmod"):
            setattr(os, name, killing(getattr(os, name)))
        module.save_file = killing(save_file, half_a_file)
        second = store.write_history(1, {"x": torch.arange(3) + 1})
        save(store, 2, [second])

    folder.mkdir()
    save_file = module.save_file
    store = CheckpointStore(folder, 1)
    save(store, 1, [store.write_history(0, {"x": torch.arange(3)})])
    return forked(work)[0]


@pytest.mark.slow
def test_sigkill_at_any_point_of_a_save_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """Every call that touches the disk, in a history write, a save and a retention, is a place to die."""
    steps = []
    for point in itertools.count(1):
        folder = tmp_path / str(point)
        code = killed_at(point, folder)
        store = CheckpointStore(folder, 1)
        steps.append(newest(store).step)
        assert_is(store, steps[-1])
        # What a resumed run does next: clean up, end the epoch again, save: nothing is doubled or left.
        for sub in ("checkpoints", "history"):
            remove_leftovers(folder / sub)
        epoch_1 = store.write_history(1, {"x": torch.arange(3) + 1})
        save(store, 2, [epoch_1])
        assert_is(store, 2)
        assert len(names(folder / "checkpoints")) == 1
        assert names(folder / "history") == [epoch_1]
        if code != -signal.SIGKILL:
            break
    assert code == 0
    assert len(steps) > 20
    assert steps == sorted(steps)  # up to some point the old one, from then on the new one
    assert set(steps) == {1, 2}


def test_a_second_signal_during_a_save_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A handler that raises in the middle of a save: the old checkpoint stands, the save can be repeated."""
    store = CheckpointStore(tmp_path, 1)
    save(store, 1)
    real = module.save_file

    def interrupted(tensors: dict[str, Tensor], path: Path) -> None:
        real(tensors, path)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(store, 2)
    assert names(tmp_path / "checkpoints") == ["step-000000001"]
    assert_is(store, 1)
    monkeypatch.undo()
    save(store, 2)
    assert_is(store, 2)


# Full disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path, "1m") as place:
        yield place


def test_a_full_disk_fails_the_save_alone(disk: Path) -> None:
    store = CheckpointStore(disk, 1)
    small = {"g": {"x": torch.zeros(1000)}}
    large = {"a": {"x": torch.zeros(1000)}, "b": {"x": torch.zeros(10**6)}}
    store.save(1, small, {"step": 1}, [])
    for _ in range(2):  # and again at the next occasion
        with pytest.raises(SaveFailed, match=r"the checkpoint of step 2 .*No space left on device"):
            store.save(2, large, {"step": 2}, [])
        with pytest.raises(SaveFailed, match="the history of epoch 3"):
            store.write_history(3, large["b"])
        assert names(disk / "checkpoints") == ["step-000000001"]
        assert names(disk / "history") == []
    store.save(2, small, {"step": 2}, [])
    assert newest(store).step == 2


# Optimisers


def train(optimizer: torch.optim.Optimizer, layers: torch.nn.Module, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        inputs = torch.full((2, 3, 4, 4), 0.1 * step + 0.3)
        layers(inputs).square().sum().backward()
        optimizer.step()


def build(name: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    first, last = torch.nn.Conv2d(3, 5, 3), torch.nn.Linear(20, 2)
    layers = torch.nn.Sequential(first, torch.nn.Flatten(), last)
    layers.to(memory_format=torch.channels_last)
    frozen = torch.nn.Parameter(torch.ones(2))  # never has a gradient, hence no state
    groups = [
        {"params": list(first.parameters()), "weight_decay": 0.1, "name": "convolution"},
        {"params": [frozen, *last.parameters()], "weight_decay": 0.0, "name": "rest"},
    ]
    if name == "sgd":
        return layers, torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    return layers, torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), amsgrad=name == "amsgrad")


@pytest.mark.parametrize("name", ["adamw", "amsgrad", "sgd"])
def test_an_optimiser_resumed_from_disk_takes_the_same_steps(tmp_path: Path, name: str) -> None:
    layers, optimizer = build(name)
    train(optimizer, layers, 3)
    store = CheckpointStore(tmp_path, 1)
    store.save(3, {"optimizer": optimizer_tensors(optimizer), "model": layers.state_dict()}, {}, [])

    checkpoint = newest(store)
    again, resumed = build(name)
    again.load_state_dict(checkpoint.tensors("model"))
    loaded = checkpoint.tensors("optimizer")
    load_optimizer(resumed, loaded)
    for old, new in zip(optimizer.state.values(), resumed.state.values(), strict=True):
        assert old.keys() == new.keys()
        for key in old:
            torch.testing.assert_close(new[key], old[key], rtol=0, atol=0)
            assert not isinstance(old[key], Tensor) or old[key].stride() == new[key].stride()
    train(optimizer, layers, 4)
    train(resumed, again, 4)
    for a, b in zip(layers.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    for key, tensor in newest(store).tensors("optimizer").items():
        assert torch.equal(loaded[key], tensor)  # the optimiser trained in memory of its own
