"""A pretend accelerator: tensors that say `cuda:0` and compute on the CPU, under a GPU's rules.

    with Accelerator() as gpu:                       # fp64=False: as Apple's mps; devices=4: one node of four
        memory = NeighborMemory(N, D, window=2, k=3, device="cuda")
        gpu.clear()
        memory.observe(ids.to("cuda"), features.to("cuda"))
        print(gpu.operations.total(), "operations,", gpu.syncs.total(), "syncs:", gpu.syncs)

Results are those of the CPU, bit for bit. What CUDA refuses is refused: tensors of two devices in one operation
(a CPU's zero-dimensional tensor may join elementwise ones), `.numpy()`, the types that its products do not mix,
fp64 where it has none, and, where deterministic algorithms are demanded, operations that have none. With TF32
allowed, fp32 products round their factors to TF32, as a GPU's would. Products of fp16 factors that are summed in fp32
may be as inexact as those of a tensor core: Accelerator(mixed_product=truncating), or worse: hostile.

Counted, by name: `operations`, the calls that would start work on the device (views and copies of metadata do not),
and `syncs`, the moments at which Python would have to wait until the device's queue is empty.

Inside the block torch believes that there is such a device: `torch.accelerator`, and for "cuda" `torch.cuda`.
Backward passes need a driver on "cuda"; Accelerator("pretend") is a kind of device of its own, under the same rules,
where they work. torch cannot forget that kind again: use it in a process of its own (`runs.start(accelerator=...)`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")

# The size of what they return is a question to the device.
_ASK_FOR_A_SIZE = {"nonzero", "masked_select", "bincount", "repeat_interleave", "_unique2", "unique_dim"}
_ASK_FOR_A_SIZE |= {"unique_consecutive", "unique_dim_consecutive"}
_ASK_FOR_A_VALUE = {"_local_scalar_dense", "equal", "is_nonzero", "linalg_svdvals", "_linalg_svd"}
_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot"}
# Indices may come from the CPU; they are copied to the device first.
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
_TAKES_A_CPU_SCALAR = {"where", "copy_", "fill_", "masked_fill", "masked_fill_", "index_put_", "index_put"}
# Of torch's list: those without a deterministic form on CUDA (cumsum: of floating-point numbers; bincount: weighted).
_NOT_DETERMINISTIC = {
    "_upsample_bicubic2d_aa_backward",
    "_upsample_bilinear2d_aa_backward",
    "upsample_bicubic2d_backward",
    "upsample_bilinear2d_backward",
    "_adaptive_avg_pool2d_backward",
    "reflection_pad2d_backward",
    "grid_sampler_2d_backward",
    "histc",
    "kthvalue",
    "put_",
}


HAS_MIXED_PRODUCTS = "dtype" in torch.ops.aten.mm.overloads()
"""Whether this torch has `torch.mm(a, b, out_dtype=...)`, as from 2.8 on."""
MIXED = (torch.float16, torch.float16, torch.float32)


# ---- torch.mm(a, b, out_dtype=torch.float32) of fp16 factors (B, D) and (D, T) ----


def accurate(a: Tensor, b: Tensor) -> Tensor:
    """Summed in fp32."""
    return a.float() @ b.float()


def truncating(a: Tensor, b: Tensor, block: int = 4) -> Tensor:
    """As a V100's tensor cores, the coarsest of all: every 4 products and the running sum are aligned to the largest
    of them, cut off below its 24 bits, added, and the sum is cut to 24 bits."""
    a, b = a.double(), b.double()  # products of fp16 numbers are exact
    total = a.new_zeros(a.shape[0], b.shape[1])
    for i in range(0, a.shape[1], block):
        products = a.T[i : i + block, :, None] * b[i : i + block, None, :]  # (block, B, T)
        terms = torch.cat([total[None], products])
        total = _cut(_cut(terms, terms.abs().amax(0)).sum(0))
    return total.float()


def hostile(a: Tensor, b: Tensor) -> Tensor:
    """Off by all that tensor cores could be off, where it hurts: the best come out too low, the others right."""
    truth = a.double() @ b.double()
    norms = torch.linalg.vector_norm(a.double(), dim=1)[:, None] * torch.linalg.vector_norm(b.double(), dim=0)
    off = (1.5 * a.shape[1] + 2) * 2.0**-23 * norms
    best = truth.topk(min(10, truth.shape[1]), dim=1).values[:, -1:]
    return (truth - off * (truth >= best)).float()


def _cut(x: Tensor, beside: Tensor | None = None) -> Tensor:
    """x without what lies below the 24 leading bits of `beside`, or of itself; towards zero."""
    exponent = torch.frexp(x if beside is None else beside).exponent
    unit = torch.exp2((exponent - 24).double())
    return (x / unit).trunc() * unit


class DeviceTensor(torch.Tensor):
    """A tensor that claims another device; `held` has its numbers."""

    held: Tensor
    owner: Accelerator

    @staticmethod
    def __new__(cls, real: Tensor, owner: Accelerator) -> DeviceTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            real.shape,
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            device=owner.device,
        )
        made.held, made.owner = real, owner
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.held}, device={self.device})"

    def tolist(self) -> Any:
        self.owner.syncs["tolist"] += 1
        return self.held.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to "
            f"host memory first."
        )

    # Where its memory is, not what is in it: safetensors asks, to find tensors that share it.
    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def storage(self) -> Any:
        return self.held.storage()

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    # With these two, Module.to puts tensors of this type in the place of parameters.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["held"], self.owner

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], owner: Accelerator, *_: Any) -> DeviceTensor:
        return DeviceTensor(inner["held"], owner)

    def __array__(self, *_: Any, **__: Any) -> Any:
        self.numpy()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function, and calls a class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        owners = [t.owner for t in tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor)]
        return owners[0].run(func, args, kwargs or {})


class Accelerator:
    """The device, and the counters of what was done with it. Use it as a context."""

    def __init__(
        self,
        kind: str = "cuda",
        *,
        devices: int = 1,
        fp64: bool = True,
        mixed_product: Callable[[Tensor, Tensor], Tensor] = accurate,
    ) -> None:
        if kind != "cuda":
            _register(kind)
        self.device = torch.device(kind, 0)
        self.devices, self.fp64 = devices, fp64
        self.mixed_product = mixed_product
        self.serial: str | None = None
        """Of the device, where processes that see one each are to tell theirs apart."""
        self.touched: set[int] = set()
        """Indices of the devices that something was made on."""
        self.operations: Counter[str] = Counter()
        self.syncs: Counter[str] = Counter()
        self._stack = ExitStack()

    def clear(self) -> None:
        """Count from zero again."""
        self.operations.clear()
        self.syncs.clear()

    def __enter__(self) -> Accelerator:
        self._stack.enter_context(self.announced())
        # cuDNN's own operations have no CPU form to compute with.
        self._stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        # Else a thread of the device would run backward passes, which torch has only if it knew it at the first one.
        self._stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        self._stack.enter_context(_Constants(self))
        self._stack.enter_context(_Factories(self))
        return self

    @contextmanager
    def announced(self) -> Iterator[None]:
        """torch believes in the device, and nothing more: for code that chooses devices, or for fake tensors."""

        def choose(device: Any) -> None:
            index = device if isinstance(device, int) else torch.device(device).index
            self.device = torch.device(self.device.type, index)

        kind = torch.device(self.device.type)
        substitutes: dict[str, Callable[..., Any]] = {
            "torch.accelerator.is_available": lambda: True,
            "torch.accelerator.current_accelerator": lambda check_available=False: kind,
            "torch.accelerator.device_count": lambda: self.devices,
            "torch.accelerator.current_device_index": lambda: self.device.index,
            "torch.accelerator.set_device_index": choose,
            "torch.accelerator.synchronize": lambda device=None: self.syncs.update(["synchronize"]),
        }
        if kind.type == "cuda":
            substitutes |= {
                "torch.cuda._lazy_init": lambda: None,
                "torch.cuda.is_available": lambda: True,
                "torch.cuda.device_count": lambda: self.devices,
                "torch.cuda.current_device": lambda: self.device.index,
                "torch.cuda.get_device_properties": lambda device=None: self._properties(device),
                "torch.cuda.is_bf16_supported": lambda including_emulation=True: True,
            }
            if not hasattr(torch._C, "_ensureCUDADeviceGuardSet"):
                pytest.skip("this torch is too old to pretend that it has CUDA")
            torch._C._ensureCUDADeviceGuardSet()
        with ExitStack() as stack:
            for name, substitute in substitutes.items():
                stack.enter_context(patch(name, substitute))
            yield

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def here(self, device: Any) -> bool:
        """Whether this names the device (None names nothing)."""
        return device is not None and torch.device(device).type == self.device.type

    def put(self, real: Tensor) -> Tensor:
        return DeviceTensor(real, self)

    def _properties(self, device: Any) -> SimpleNamespace:
        index = None if device is None else torch.device(device).index
        number = self.device.index if index is None else index
        return SimpleNamespace(uuid=self.serial or f"6f1d3b52-8a47-4c1e-9f05-7ab34c0e{number + 1:04x}")

    # ---- one operation ----

    def run(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = "mixed_mm" if _is_mixed(call) else call._schema.name.split("::")[1]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        mine = any(isinstance(t, DeviceTensor) for t in tensors)
        wanted = kwargs.get("device")
        if name == "_fused_sdp_choice" and mine:
            return 0  # plain products
        if not mine and not self.here(wanted):
            return call(*args, **kwargs)  # the CPU's own business
        if name == "_to_copy":
            return self._copy(call, args[0], kwargs)
        if mine:
            self._refuse(call, name, args, tensors)
            self._count(call, name, args, kwargs)
        there = mine if wanted is None else self.here(wanted)
        if there:
            self._touch(wanted)
        plain = {key: _real(value) for key, value in kwargs.items()} | (
            {} if wanted is None else {"device": CPU}
        )
        self._require_type(plain.get("dtype"), there)
        inputs = _real(args)
        if name in _PRODUCTS and mine and self._tf32():
            inputs = tree_map(_to_tf32, inputs)
        result = self.mixed_product(*inputs[:2]) if name == "mixed_mm" else call(*inputs, **plain)
        return self._wrap(call, args, kwargs, result) if there else result

    def _copy(self, call: Any, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        from_here = isinstance(source, DeviceTensor)
        to_here = from_here if kwargs.get("device") is None else self.here(kwargs["device"])
        self._require_type(kwargs.get("dtype") or source.dtype, to_here)
        if from_here != to_here and not (to_here and kwargs.get("non_blocking")):
            self.syncs["to the device" if to_here else "to the CPU"] += 1
        self.operations["_to_copy"] += 1
        if to_here:
            self._touch(kwargs.get("device"))
        made = call(_real(source), **(kwargs | {"device": CPU, "non_blocking": False}))
        return self.put(made) if to_here else made

    def _touch(self, device: Any) -> None:
        index = None if device is None else torch.device(device).index
        index = self.device.index if index is None else index
        if index >= self.devices:
            raise RuntimeError("CUDA error: invalid device ordinal")
        self.touched.add(index)

    def _require_type(self, dtype: torch.dtype | None, there: bool) -> None:
        if there and dtype == torch.float64 and not self.fp64:
            raise TypeError(f"{self.device} does not support float64. Please use float32 instead.")

    def _refuse(self, call: Any, name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> None:
        """What the device's own kernels would refuse."""
        scalars_may_mix = torch.Tag.pointwise in call.tags or name in _TAKES_A_CPU_SCALAR
        for at, tensor in enumerate(tensors):
            if isinstance(tensor, DeviceTensor) or (scalars_may_mix and tensor.ndim == 0):
                continue
            if name == "copy_" or (
                name in _INDEXING and isinstance(args[0], DeviceTensor) and _is_index(tensor, args)
            ):
                continue
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {self.device} and "
                f"cpu! (argument {at} of {call}, shape {tuple(tensor.shape)})"
            )
        if name == "mixed_mm" and (args[0].dtype, args[1].dtype, args[2]) != MIXED:
            raise RuntimeError("out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs")
        weighted = name == "bincount" and len(tensors) > 1
        floating_sum = name == "cumsum" and args[0].dtype.is_floating_point
        if torch.are_deterministic_algorithms_enabled() and (
            name in _NOT_DETERMINISTIC or weighted or floating_sum
        ):
            raise RuntimeError(f"{name} does not have a deterministic implementation, but you set ...")

    def _count(self, call: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.is_view or name in ("detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias"):
            return
        self.operations[name] += 1
        indices = [t for t in tree_leaves(args[1:2]) if isinstance(t, Tensor)] if name in _INDEXING else []
        if name == "repeat_interleave" and kwargs.get("output_size") is not None:
            return
        if name in _ASK_FOR_A_SIZE | _ASK_FOR_A_VALUE:
            self.syncs[name.lstrip("_") if name != "_local_scalar_dense" else "item"] += 1
        elif any(t.dtype in (torch.bool, torch.uint8) for t in indices):
            self.syncs[f"{name} by a mask"] += 1
        elif any(not isinstance(t, DeviceTensor) for t in indices):
            self.syncs["to the device"] += 1
        elif name == "copy_" and isinstance(args[0], DeviceTensor) != isinstance(args[1], DeviceTensor):
            to_here = isinstance(args[0], DeviceTensor)
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            if not (to_here and (non_blocking or args[1].ndim == 0)):
                self.syncs["to the device" if to_here else "to the CPU"] += 1

    def _tf32(self) -> bool:
        if self.device.type != "cuda":
            return False
        if hasattr(torch.backends.cuda.matmul, "fp32_precision"):
            return torch.backends.cuda.matmul.fp32_precision == "tf32"
        return torch.backends.cuda.matmul.allow_tf32

    def _wrap(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Results as tensors of this device; what was changed in place is the argument itself."""
        changed = {id(t.held): t for t in tree_leaves((args, kwargs)) if isinstance(t, DeviceTensor)}

        def wrap(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return changed[id(x)] if id(x) in changed else self.put(x)

        return tree_map(wrap, result)


class _Factories(TorchDispatchMode):
    """Sends calls that name the device without holding one of its tensors (`torch.zeros(device=...)`) there."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.accelerator.run(call, args, kwargs or {})


class _Constants(TorchFunctionMode):
    """`torch.tensor` fills its memory below the dispatcher: make the tensor on the CPU, then send it over."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator

    def __torch_function__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if call in (torch.tensor, torch.as_tensor) and self.accelerator.here(kwargs.get("device")):
            return call(*args, **(kwargs | {"device": CPU})).to(self.accelerator.device)
        if call is Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            made = torch.tensor(*args[1:], **({"dtype": args[0].dtype} | kwargs | {"device": CPU}))
            return made.to(self.accelerator.device)
        return call(*args, **kwargs)


_kept: list[Any] = []


@cache
def _register(kind: str) -> None:
    """Make a new kind of device known to torch, which cannot forget it: for processes of their own."""

    class Backend(backend_registration._DummyBackendModule):
        def get_amp_supported_dtype(self) -> list[torch.dtype]:
            return [torch.float16, torch.bfloat16]

    backend_registration._setup_privateuseone_for_python_backend(kind, Backend())
    autocast = torch.library.Library("_", "IMPL", "AutocastPrivateUse1")
    autocast.fallback(torch.library.fallthrough_kernel)  # it knows autocast, and casts nothing
    _kept.append(autocast)


def _real(tree: Any) -> Any:
    return tree_map(lambda x: x.held if isinstance(x, DeviceTensor) else x, tree)


def _is_index(tensor: Tensor, args: tuple[Any, ...]) -> bool:
    return any(tensor is index for index in tree_leaves(args[1]))


def _is_mixed(call: Any) -> bool:
    return call._schema.name == "aten::mm" and call._schema.overload_name == "dtype"


def _to_tf32(x: Any) -> Any:
    """fp32 with 10 bits of fraction, rounded to nearest."""
    if not isinstance(x, Tensor) or x.dtype != torch.float32:
        return x
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)
