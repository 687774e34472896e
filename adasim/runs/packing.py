"""Nested Python state as tensors plus JSON, and back exactly: what pickle would do, without running anything.

>>> import torch
>>> tensors, info = pack({"betas": (0.9, 0.999), 3: [torch.ones(2), None]})
>>> sorted(tensors), unpack(tensors, info)["betas"]
(['3.0'], (0.9, 0.999))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def pack(tree: Any) -> tuple[dict[str, Tensor], Any]:
    """Split dicts (keys: str or int), lists, tuples, tensors and scalars into named tensors and JSON.

    JSON has no tuples, no integer keys and no tensors; those become `{"tuple": [...]}`,
    `{"dict": [[key, value], ...]}` and `{"tensor": name}`. Floats come back bit by bit
    (Python writes the shortest text that does so).
    """
    tensors: dict[str, Tensor] = {}

    def walk(node: Any, where: str) -> Any:
        if isinstance(node, Tensor):
            tensors[where] = node.detach()
            return {"tensor": where}
        if isinstance(node, dict):
            if not all(type(k) in (str, int) for k in node):
                raise TypeError(f"{where or 'the top'} has a key that is neither text nor an integer")
            return {"dict": [[k, walk(v, f"{where}.{k}".lstrip("."))] for k, v in node.items()]}
        if isinstance(node, list | tuple):
            values = [walk(v, f"{where}.{i}".lstrip(".")) for i, v in enumerate(node)]
            return {"tuple": values} if isinstance(node, tuple) else values
        if node is None or isinstance(node, bool | int | float | str):
            return node
        raise TypeError(f"{where} is a {type(node).__name__}, which cannot be saved without pickle")

    return tensors, walk(tree, "")


def unpack(tensors: dict[str, Tensor], info: Any) -> Any:
    """The inverse of `pack`, also after a trip through JSON."""
    if isinstance(info, dict):
        ((kind, value),) = info.items()
        if kind == "tensor":
            return tensors[value]
        if kind == "tuple":
            return tuple(unpack(tensors, v) for v in value)
        return {k: unpack(tensors, v) for k, v in value}
    return [unpack(tensors, v) for v in info] if isinstance(info, list) else info


def pack_optimizer(optimizer: Optimizer) -> tuple[dict[str, Tensor], Any]:
    """An optimiser's `state_dict` as tensors (moments, step counts) and JSON (each group's settings)."""
    return pack(optimizer.state_dict())


def unpack_optimizer(optimizer: Optimizer, tensors: dict[str, Tensor], info: Any) -> None:
    """Put a packed state into an optimiser over the same parameters: same values, types, memory layout."""
    state = unpack(tensors, info)
    optimizer.load_state_dict(state)
    for group in optimizer.param_groups:  # which kernels work here is this process's choice, not the file's
        group |= {name: optimizer.defaults[name] for name in ("foreach", "fused")}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, saved in state["state"].get(index, {}).items():
            if not isinstance(saved, Tensor):
                continue
            # load_state_dict casts moments to the parameter's type and adopts the file's pages, and files do
            # not keep channels-last, without which the fused kernels lose their fast path.
            device = optimizer.state[parameter][name].device
            like = parameter if saved.shape == parameter.shape else saved
            optimizer.state[parameter][name] = torch.empty_like(like, dtype=saved.dtype, device=device).copy_(
                saved
            )
