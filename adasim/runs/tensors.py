"""Tensors in safetensors files, bit by bit, and an optimiser's among them."""

from __future__ import annotations

import stat
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import Optimizer

from adasim.util.files import sync


def read_tensors(path: Path) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """One safetensors file, from the tensors' own memory. safetensors refuses strided and shared tensors."""
    seen: set[int] = set()
    dense: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        if tensor.numel() and tensor.data_ptr() in seen:  # tied weights
            tensor = tensor.clone()
        seen.add(tensor.data_ptr())
        dense[name] = tensor
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    save_file(dense, path)
    path.chmod(mode)  # safetensors makes files that their owner alone can read, whatever the umask
    sync(path)


def optimizer_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """An optimiser's moments and step counts, as `state.NUMBER OF THE PARAMETER.NAME`. Rates and decay are no state:
    schedules set them before every step."""
    state = optimizer.state_dict()["state"]
    return {
        f"state.{index}.{name}": value.detach()
        for index, values in state.items()
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


def load_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor]) -> None:
    """Put `optimizer_tensors` into an optimiser over the same parameters: same values, types, memory layout."""
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        _, index, name = key.split(".", 2)
        state.setdefault(int(index), {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, values in state.items():
        parameter = parameters[number]
        for name, saved in values.items():
            # load_state_dict casts moments to the parameter's type and adopts the file's pages, and files do
            # not keep channels-last, without which the fused kernels lose their fast path.
            device = optimizer.state[parameter][name].device
            like = parameter if saved.shape == parameter.shape else saved
            copy = torch.empty_like(like, dtype=saved.dtype, device=device).copy_(saved)
            optimizer.state[parameter][name] = copy
