"""Search and memory on a pretend GPU: its rules are kept, and the answers are the CPU's bit for bit."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerator import HAS_MIXED_PRODUCTS, Accelerator
from helpers import assert_same, on_grid
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adasim.neighbors import NeighborMemory, ShardedMemory, search
from adasim.neighbors import memory as memory_module

Pair = tuple[Tensor, Tensor]


def on_cpu(found: Pair) -> Pair:
    return found[0].cpu(), found[1].cpu()


# ---- products are IEEE fp32, whatever the program around allows ----


BACKENDS: Any = torch.backends  # some of their attributes are hidden from type checkers


def crowded() -> Pair:
    """Rows so close together that bf16 or TF32 products put them in another order."""
    torch.manual_seed(3)
    rows = on_grid(torch.randn(20, 96)[torch.randint(20, (6_000,))] + 0.05 * torch.randn(6_000, 96))
    return on_grid(rows[:256] + 0.01 * torch.randn(256, 96)), rows


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_search_is_exact_under_autocast(device: str) -> None:
    queries, rows = crowded()
    expected = search(queries, rows, 10)
    with torch.autocast(device, torch.bfloat16):
        there = queries.to(device), rows.to(device)
        assert (there[0] @ there[1].T).dtype == torch.bfloat16
        assert_same(on_cpu(search(*there, 10)), expected)
        assert torch.is_autocast_enabled(device)


ALLOW: dict[str, Callable[[], None]] = {
    "by the old name": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    "by the new name": lambda: setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32"),
    "by precision": lambda: torch.set_float32_matmul_precision("medium"),
    "everywhere": lambda: setattr(BACKENDS, "fp32_precision", "tf32"),
}


def settings() -> tuple[Any, ...]:
    def old_tf32() -> Any:
        try:
            return torch.backends.cuda.matmul.allow_tf32
        except RuntimeError as error:  # the old name is not to be used after the new one
            return str(error).splitlines()[0]

    cuda, cpu = torch.backends.cuda.matmul.fp32_precision, BACKENDS.mkldnn.matmul.fp32_precision
    return BACKENDS.fp32_precision, cuda, cpu, old_tf32()


@pytest.fixture
def _precision_as_before() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    if not hasattr(torch.backends, "fp32_precision"):  # torch before 2.9
        return
    BACKENDS.fp32_precision = "none"
    torch.backends.cuda.matmul.fp32_precision = "none"
    BACKENDS.mkldnn.matmul.fp32_precision = "none"


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.usefixtures("_precision_as_before", "gpu")
@pytest.mark.parametrize("how", ALLOW)
def test_search_is_exact_with_tf32_allowed_and_leaves_it_allowed(how: str) -> None:
    queries, rows = crowded()
    expected = search(queries, rows, 10)
    ALLOW[how]()
    before = settings()
    there = queries.to("cuda"), rows.to("cuda")
    assert not torch.equal((there[0] @ there[1].T).cpu(), queries @ rows.T)  # the pretend GPU does use it
    assert_same(on_cpu(search(*there, 10)), expected)
    assert settings() == before
    if how == "everywhere":  # still follows the level above
        BACKENDS.fp32_precision = "ieee"
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"


class Watch(TorchDispatchMode):
    """Notes how short oneDNN may make the factors of every product."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: set[str] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if call._schema.name in ("aten::mm", "aten::mv", "aten::addmv"):
            self.allowed.add(BACKENDS.mkldnn.matmul.fp32_precision)
        return call(*args, **(kwargs or {}))


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch before 2.9")
@pytest.mark.usefixtures("_precision_as_before")
def test_a_cpus_products_are_never_bf16_inside_a_search() -> None:
    queries, rows = crowded()
    torch.set_float32_matmul_precision("medium")
    with Watch() as watch:
        _ = queries @ rows.T
        assert watch.allowed == {"bf16"}
        watch.allowed.clear()
        search(queries, rows, 10)
    assert watch.allowed == {"ieee"}
    assert torch.get_float32_matmul_precision() == "medium"


# ---- the memory ----


def three_epochs(
    memory: NeighborMemory, gpu: Accelerator | None = None, rank: int = 0, world: int = 1
) -> Iterator[tuple[str, list[Tensor]]]:
    """What a memory says to a process that brings every `world`-th image of each batch, piece by piece."""
    generator, device = torch.Generator().manual_seed(4), "cuda" if gpu else "cpu"
    base = torch.randn(memory.num_images, memory.dim, generator=generator)
    for epoch in range(3):
        for ids in torch.randperm(memory.num_images, generator=generator).split(29):
            features = base[ids] + 0.1 * torch.randn(len(ids), memory.dim, generator=generator)
            features[0, 0] = torch.nan
            there = ids[rank::world].to(device), features[rank::world].to(device)
            if gpu:
                gpu.clear()
            yield "observed", list(memory.observe(*there))
        memory.end_epoch()
        yield "of all images", [memory.draw_partners(epoch + 1, 0.2, 1), memory.nearest_other()]
        mine = torch.arange(rank, memory.num_images, world)
        yield "distribution", list(memory.distribution(mine.to(device), 0.2))


def all_said(memory: NeighborMemory, gpu: Accelerator | None = None) -> list[Tensor]:
    said = [tensor for _, tensors in three_epochs(memory, gpu) for tensor in tensors]
    return [tensor.cpu() for tensor in (*said, *memory.state_dict().values())]


@pytest.mark.parametrize("kind", [NeighborMemory, ShardedMemory])
def test_a_memory_on_a_device_says_what_a_cpus_says(
    kind: type[NeighborMemory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_module, "INT8_FROM", 1)
    options: Any = {"num_images": 203, "dim": 20, "window": 2, "k": 4, "dtype": torch.float16}
    expected = all_said(kind(**options))
    with Accelerator() as gpu:
        memory = kind(**options, device="cuda")
        found = all_said(memory, gpu)
        assert memory.cache.device == gpu.device
        assert memory._quantized is None  # an int8 copy is for CPUs
        assert (gpu.operations["mixed_mm"] > 0) == HAS_MIXED_PRODUCTS
        restored = kind(**options, device="cuda")
        restored.load_state_dict({name: t.cpu() for name, t in memory.state_dict().items()})
        assert torch.equal(restored.cache.cpu(), memory.cache.cpu())
    assert all(map(torch.equal, found, expected))


def test_a_device_without_fp64_leaves_the_memory_on_the_cpu() -> None:
    options: Any = {"num_images": 203, "dim": 20, "window": 2, "k": 4}
    expected = all_said(NeighborMemory(**options))
    with Accelerator(fp64=False) as gpu:
        memory = NeighborMemory(**options, device="cuda")
        found = all_said(memory, gpu)
    assert (memory.cache.device.type, memory.cache.dtype) == ("cpu", torch.float32)
    assert all(map(torch.equal, found, expected))


def on_two_ranks(folder: Path, stage: int) -> list[list[Tensor]]:
    """Stage 0: gloo, so that words travel over the CPU. Stage 1: the same with tensors that stay on the device,
    as with NCCL."""
    if stage == 1:
        dist.get_backend = lambda group=None: "nccl"
    said = []
    with Accelerator() as gpu:
        memory = ShardedMemory(61, 6, window=2, k=4, device="cuda")
        for what, tensors in three_epochs(memory, gpu, dist.get_rank(), 2):
            if stage == 1 and what == "observed" and len(tensors[0]):
                # ids checked, sizes of all parts, proofs, lists to main memory
                assert gpu.syncs == {"tolist": 2, "nonzero": 1, "to the CPU": 1}, gpu.syncs
            said.append([tensor.cpu() for tensor in tensors])
    return said


def test_a_sharded_memory_on_devices_says_what_one_process_says(
    run_ranks: Callable[..., list[list[Any]]],
) -> None:
    alone = NeighborMemory(61, 6, window=2, k=4, dtype=torch.float16)
    expected = list(three_epochs(alone))
    for stage in run_ranks(__file__, "on_two_ranks", 2, 2):
        for rank, said in enumerate(stage):
            for mine, (what, whole) in zip(said, expected, strict=True):
                part = whole if what == "of all images" else [tensor[rank::2] for tensor in whole]
                assert all(map(torch.equal, mine, part))


# ---- the pretend device itself ----


def test_the_pretend_device_refuses_what_a_gpu_refuses(gpu: Accelerator) -> None:
    there = torch.ones(3, 4, device="cuda")
    assert there.device == torch.device("cuda", 0)
    assert (there + torch.tensor(2.0)).device == gpu.device  # a scalar of the CPU may join
    with pytest.raises(RuntimeError, match="on the same device"):
        there + torch.ones(4)
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(3, 4) + there[0, 0]
    with pytest.raises(RuntimeError, match="on the same device"):
        torch.ones(5)[torch.zeros(2, dtype=torch.long, device="cuda")]
    with pytest.raises(TypeError, match="to numpy"):
        there.numpy()
    if HAS_MIXED_PRODUCTS:
        with pytest.raises(RuntimeError, match="out_dtype must be"):
            torch.mm(there, there.T, out_dtype=torch.float64)


def test_the_pretend_device_counts_operations_and_syncs(gpu: Accelerator) -> None:
    there = torch.arange(6.0).to("cuda")
    gpu.clear()
    there = (there * 2).view(2, 3)[0]  # views are free
    assert gpu.operations == {"mul": 1}
    assert not gpu.syncs
    assert float(there.sum()) == 6.0
    _ = there[there > 1], there[torch.tensor([0, 1])], there.cpu(), there.nonzero()
    assert gpu.syncs == {"item": 1, "index by a mask": 1, "to the device": 1, "to the CPU": 1, "nonzero": 1}
    gpu.clear()
    torch.arange(6).to("cuda", non_blocking=True)
    assert gpu.syncs.total() == 0
