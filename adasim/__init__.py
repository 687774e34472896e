"""AdaSim: adaptive similarity bootstrapping for self-distillation (ICCV 2023).

The names most people need, loaded when first used so that `adasim.neighbors` needs torch and numpy alone:

    adasim.NeighborMemory          the neighbour memory, for a training loop of your own
    adasim.PairSampler             image and partner ids for a DataLoader, beside
    adasim.PairDataset             the data set that turns them into two views
    adasim.pretrain(config, ...)   the whole of pretraining
    adasim.evaluate(run, "knn")    what `adasim eval` measures, as values
    adasim.embed(run, "photos/")   features of all images, with file names and labels
    adasim.similar(run, image, "photos/")   the most similar images and their scores
    adasim.export(run, "onnx")     the encoder for other libraries: timm, hf, onnx, pt2
    adasim.plot(runs)              the curves of one run or several, as a figure
    adasim.load_backbone(path)     a pretrained encoder back from a run folder or a .safetensors file
    adasim.load_run(path)          a run to look at: configuration, metrics, encoder, neighbour memory
"""

from importlib import import_module
from typing import Any

from adasim.util.machine import spin_briefly

spin_briefly()  # torch, which is imported later, reads the setting once

__version__ = "0.3.0"
_HOMES = {
    "NeighborMemory": "adasim.neighbors",
    "PairDataset": "adasim.neighbors",
    "PairSampler": "adasim.neighbors",
    "embed": "adasim.tools.embed",
    "evaluate": "adasim.api",
    "export": "adasim.tools.export",
    "load_backbone": "adasim.models",
    "load_run": "adasim.api",
    "plot": "adasim.tools.plot",
    "pretrain": "adasim.api",
    "similar": "adasim.tools.embed",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'adasim' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
