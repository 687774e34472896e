"""The one way from images to features: a frozen encoder, one centred view, and a cache on disk.

    features = cached_features(run / "features", backbone, images, EvalTransform.for_run(config))
    features.values, features.ids         # (n, D) and (n,), readable images only

A pass over the data is saved under the hash of the weights, the data, the transform and the kind of feature, so that
several evaluations cost one pass, and an interrupted one goes on where it stopped. A damaged file counts as absent;
the cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import safetensors
import safetensors.torch
import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from adasim.data import ImageSet
from adasim.data.pool import read_batches
from adasim.dist.devices import image_layout
from adasim.dist.processes import ALONE, Distributed
from adasim.models import Backbone
from adasim.models.io import as_bytes, hash_tensors
from adasim.models.transform import EvalTransform
from adasim.util.errors import UserError
from adasim.util.files import atomic_write, remove
from adasim.util.terminal import few, progress_bar

FeatureKind = Literal["pooled", "linear-dino"]
"""`pooled`: the encoder's own output. `linear-dino`: what DINO's linear layer sees (docs/evaluation.md)."""
MAX_UNREADABLE = 0.01
"""Above this share of unreadable images an evaluation stops, as pretraining does."""
SAVE_S = 30.0
"""Seconds of work that a killed pass may lose."""
_VERSION = 2  # of the features that a transform gives: features saved by earlier versions are made anew


@dataclass
class Features:
    """Features of the readable images of a data set."""

    values: Tensor  # (n, D), float32
    ids: Tensor  # (n,): which images of the data set these are
    unreadable: dict[int, str]  # {id: where and why} of the images left out

    def of(self, ids: Tensor) -> Features:
        """The features of some images of the data set."""
        rows = torch.isin(self.ids, ids)
        return self if rows.all() else Features(self.values[rows], self.ids[rows], self.unreadable)


def cached_features(
    folder: Path | None,
    backbone: Backbone,
    images: ImageSet,
    transform: EvalTransform,
    *,
    kind: FeatureKind = "pooled",
    max_unreadable: float = MAX_UNREADABLE,
    ranks: Distributed = ALONE,
    **how: Any,
) -> Features:
    """The features of `images`, read from `folder` or made by `extract` and saved there; None: neither.

    Unreadable images are left out by row; a greater share of them than `max_unreadable` is refused. All ranks read
    the folder, and the first one writes it. `how` are further arguments of `extract`.
    """
    array = images.as_array()
    if array is not None:
        transform = transform.for_shape(array.shape[-2], array.shape[-1])
    path = None if folder is None else folder / _file_name(backbone, images, transform, kind)
    saved = None if path is None else read_features(path)
    if ranks.all_any(saved is None) or saved is None:
        unreadable: dict[int, str] = {}
        parts = None if path is None else path.with_suffix(".parts")
        values = extract(
            backbone, images, transform, kind=kind, unreadable=unreadable, parts=parts, ranks=ranks, **how
        )
        if path and parts and ranks.is_main and write_features(path, values, unreadable):
            with suppress(OSError):
                remove(parts)
    else:
        values, unreadable = saved
    if len(unreadable) > max_unreadable * len(images):
        raise UserError(
            f"{len(unreadable)} of the {len(images)} images of {images.name} cannot be read: "
            f"{few(unreadable.values())}. Repair or remove them."
        )
    readable = torch.ones(len(images), dtype=torch.bool)
    readable[list(unreadable)] = False
    ids = readable.nonzero()[:, 0]
    values = values[ids] if unreadable else values
    require_finite(values, backbone)
    return Features(values, ids, unreadable)


def extract(
    backbone: Backbone,
    images: ImageSet,
    transform: EvalTransform,
    *,
    kind: FeatureKind = "pooled",
    device: torch.device | str = "cpu",
    batch_size: int = 256,
    workers: int = 0,
    progress: bool = True,
    unreadable: dict[int, str] | None = None,
    parts: Path | None = None,
    ranks: Distributed = ALONE,
) -> Tensor:
    """Features of every image in order, float32 (N, D) on the CPU; the encoder's modes are left as they were.

    Beside the result no more than a batch is held. A progress bar is shown on a terminal only. Several processes make
    a batch each at a time, the same batches and so the same bits as one would, and all of them get all features.

    Args:
        kind: "pooled", or "linear-dino" for DINO's linear protocol.
        workers: processes that read images which are not in memory.
        unreadable: filled with {id: where and why} of images that cannot be read, whose rows become NaN.
            Without it the first such image stops the pass: a row too few would shift all labels after it.
        parts: a folder for what is done so far, to go on from after an interruption.
        ranks: the processes that make them together; each calls this.
    """
    backbone.to(device)
    failures = {} if unreadable is None else unreadable
    # The last bits of features depend on the device and on which images share a batch: other parts are not used.
    saved = _Parts(parts, f"in batches of {batch_size} on {torch.device(device).type}")
    features, failed = saved.load()
    done = min(ranks.gather(len(features)))  # a process may see less of what was saved
    failures.update({i: why for i, why in failed.items() if i < done})
    rows = torch.full((len(images), features.shape[1]), torch.nan)
    rows[:done] = features[:done]
    mine = torch.arange(done, len(images)).split(batch_size)[ranks.rank :: ranks.world]
    made = batches(images, transform, mine, workers)

    def next_batch() -> tuple[Tensor, Tensor, dict[int, str]]:
        """Ids and features of this process's next batch, and what cannot be read of it; nothing where it has none."""
        ids, pixels, failed = next(made, (torch.empty(0, dtype=torch.int64), torch.empty(0), {}))
        if len(pixels):
            with torch.inference_mode():
                pixels = encode(backbone, transform.normalise(pixels.to(device)), kind).float().cpu()
        return ids, pixels, failed

    progress = progress and ranks.is_main
    with frozen(backbone), progress_bar(f"{images.name}: features", len(images), progress) as bar:
        bar(done)
        try:
            while done < len(images):
                for ids, features, failed in ranks.gather(next_batch()):
                    if failed and unreadable is None:
                        why = next(iter(failed.values()))
                        raise UserError(f"An image cannot be read: {why}. Repair or remove it.")
                    failures.update(failed)
                    if len(ids):
                        if not rows.shape[1]:
                            rows = torch.full((len(images), features.shape[1]), torch.nan)
                        rows[ids] = features
                    done += len(ids) + len(failed)
                    bar(len(ids) + len(failed))
                if ranks.is_main and time.monotonic() - saved.time >= SAVE_S:
                    saved.save(rows, done, failures)
        except BaseException:
            if ranks.is_main:
                saved.save(rows, done, failures)
            raise
    if not rows.shape[1]:
        raise UserError(f"Not one of the {len(images)} images of {images.name} can be read.")
    return rows


def batches(
    images: ImageSet, transform: EvalTransform, wanted: Sequence[Tensor], workers: int
) -> Iterator[tuple[Tensor, Tensor, dict[int, str]]]:
    """Ids, 8-bit views, and {id: where and why} of images that cannot be read, of each of the batches of consecutive
    images."""
    array = images.as_array()
    if array is not None:
        for ids in wanted:
            yield ids, transform.crop(array[ids[0] : ids[-1] + 1]), {}
        return
    shapes: list[tuple[int, ...]] = [(3, transform.size, transform.size)]
    for ids, (pixels,), failed in read_batches(
        lambda i: (transform.crop(images.load(i)),), wanted, shapes, workers
    ):
        if failed:
            readable = torch.tensor([i not in failed for i in ids.tolist()])
            ids, pixels = ids[readable], pixels[readable]
        yield ids, pixels, failed


def encode(backbone: Backbone, views: Tensor, kind: FeatureKind = "pooled") -> Tensor:
    """Features (B, D) of normalised views (B, 3, S, S).

    "linear-dino" is the last four blocks' CLS side by side, or from ViT-B's width (768) on the last CLS and
    the mean patch; a net without CLS gives its pooled output.
    """
    net = backbone.net
    views = views.contiguous(memory_format=image_layout(views.device))
    if kind == "pooled" or not isinstance(net, VisionTransformer) or net.cls_token is None:
        return backbone(views)
    if net.embed_dim >= 768:
        cls, patches = backbone.tokens(views)[0]  # (B, D), (B, D, h, w)
        return torch.cat([cls, patches.mean(dim=(2, 3))], dim=1)  # type: ignore[list-item]
    blocks = backbone.tokens(views, min(4, len(net.blocks)))
    return torch.cat([cls for cls, _ in blocks], dim=1)  # type: ignore[misc]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the length of the block, then every module as it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def require_size(backbone: Backbone, size: int) -> None:
    """Refuse a side that the encoder cannot look at: a black image is tried."""
    try:
        with frozen(backbone), torch.inference_mode():
            backbone(torch.zeros(1, 3, size, size, device=backbone.device))
    except (AssertionError, RuntimeError, ValueError) as error:  # each of timm's nets says it in its own way
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(
            f"{backbone.spec['name']} cannot look at images of {size} x {size} pixels ({reason}). Choose another "
            f"--size."
        ) from None


def require_finite(features: Tensor, backbone: Backbone) -> None:
    """Refuse features (B, ...) that are not finite, with the cause."""
    wrong = int((~finite_rows(features)).sum())
    if not wrong:
        return
    weights = backbone.net.state_dict()
    broken = [name for name, tensor in weights.items() if not tensor.isfinite().all()]
    cause = "its weights are finite, so they are too large, or its mean and std are not its own"
    if broken:
        cause = f"{len(broken)} of its {len(weights)} tensors of weights are not finite either, such as {broken[0]}"
    raise UserError(
        f"{backbone.spec['name']} gives features that are not finite for {wrong:,} of {len(features):,} images: "
        f"{cause}. Use other weights."
    )


def finite_rows(features: Tensor) -> Tensor:
    """(B, ...) -> (B,): whether all values of a row are finite."""
    low, high = features.flatten(1).aminmax(dim=1)  # both are NaN where any value is
    return low.isfinite() & high.isfinite()


# ---- on disk ----


def default_folder() -> Path:
    """Where features go that belong to no run: `adasim/features` in the user's cache."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "adasim" / "features"


def weights_hash(backbone: Backbone) -> str:
    """SHA-256 over the encoder's description and weights."""
    return hash_tensors(backbone.net.state_dict(), json.dumps(backbone.spec, sort_keys=True))


def _file_name(backbone: Backbone, images: ImageSet, transform: EvalTransform, kind: str) -> str:
    facts = {
        "version": _VERSION,
        "weights": weights_hash(backbone),
        "data": images.cache_key(),
        "transform": asdict(transform),
        "what": kind,
    }
    return f"{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]}.safetensors"


class _Parts:
    """What a pass has made so far, in a folder that is there until the pass is complete; None saves nothing."""

    def __init__(self, folder: Path | None, made: str) -> None:
        self.folder, self.made, self.rows, self.time = folder, made, 0, time.monotonic()

    def load(self) -> tuple[Tensor, dict[int, str]]:
        """Features (n, D) of the first n images, and {id: where and why} of the unreadable ones among them."""
        found, unreadable = [torch.empty(0, 0)], dict[int, str]()
        for path in sorted(self.folder.glob("*.safetensors")) if self.folder else ():
            part = read_features(path, self.made) if int(path.name[:12]) == self.rows else None
            if part is not None:
                found.append(part[0])
                unreadable |= part[1]
                self.rows += len(part[0])
        return torch.cat(found[1:] or found), unreadable

    def save(self, features: Tensor, done: int, unreadable: dict[int, str]) -> None:
        """Write what is new of the first `done` rows."""
        self.time = time.monotonic()
        if self.folder is None or done <= self.rows or not features.shape[1]:
            return
        path = self.folder / f"{self.rows:012}-{done:012}.safetensors"
        some = {i: why for i, why in unreadable.items() if self.rows <= i < done}
        if write_features(path, features[self.rows : done], some, self.made):
            self.rows = done


def write_features(path: Path, values: Tensor, unreadable: dict[int, str], made: str = "") -> bool:
    """Write them, whole or not at all; a full or read-only disk costs the next evaluation a pass, nothing else."""
    header = {
        "sha256": hashlib.sha256(as_bytes(values)).hexdigest(),
        "unreadable": json.dumps(unreadable),
        "made": made,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, safetensors.torch.save({"features": values.contiguous()}, header))
    except OSError:
        return False
    return True


def read_features(path: Path, made: str = "") -> tuple[Tensor, dict[int, str]] | None:
    """What `write_features` wrote, or None if it is absent, not whole, or made in another way."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header, values = file.metadata(), file.get_tensor("features")
        unreadable = {int(i): str(reason) for i, reason in json.loads(header["unreadable"]).items()}
        whole = hashlib.sha256(as_bytes(values)).hexdigest() == header["sha256"]
        return (values, unreadable) if whole and header["made"] == made else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, safetensors.SafetensorError):
        return None


# ---- features and labels as the protocols take them ----


class LabelledSets(NamedTuple):
    """Train and test sets that fit together; labels became 0..C-1, in the order of the C values seen in training."""

    train: Tensor  # (N, D)
    train_labels: Tensor  # (N,) int64
    test: Tensor  # (M, D)
    test_labels: Tensor  # (M,) int64
    classes: Tensor  # (C,) the labels as they were given


def check_split(train: Any, train_labels: Any, test: Any, test_labels: Any) -> LabelledSets:
    """Two labelled sets of features (tensors or arrays) that fit together, or a UserError."""
    train, test = check_features(train, "train_features"), check_features(test, "test_features")
    if train.shape[1] != test.shape[1]:
        raise UserError(
            f"train_features are {train.shape[1]} wide and test_features {test.shape[1]}. Use one backbone for both."
        )
    train_labels = check_labels(train_labels, len(train), "train_labels").to(train.device)
    test_labels = check_labels(test_labels, len(test), "test_labels").to(train.device)
    classes, train_labels = train_labels.unique(return_inverse=True)  # sorted: the order of classes is kept
    places = torch.searchsorted(classes, test_labels).clamp(max=len(classes) - 1)
    unseen = test_labels[classes[places] != test_labels].unique().tolist()
    if unseen:
        raise UserError(
            f"test_labels hold {some_ids(unseen)} that train_labels never show. Leave those images out, or train on "
            f"a split that has every class."
        )
    return LabelledSets(train, train_labels, test.to(train.device), places, classes)


def check_features(features: Any, name: str) -> Tensor:
    """An (N, D) table of finite floating-point features, N and D at least 1."""
    features = torch.as_tensor(features)
    if features.ndim != 2 or features.numel() == 0:
        raise UserError(f"{name} has shape {tuple(features.shape)}; give a non-empty (images, width) table.")
    if not features.is_floating_point():
        raise UserError(f"{name} holds {features.dtype}; give floating-point features.")
    wrong = (~finite_rows(features)).nonzero()
    if len(wrong):
        raise UserError(f"{name} has a NaN or infinite value in row {int(wrong[0])}. Leave that image out.")
    return features


def check_labels(labels: Any, count: int, name: str) -> Tensor:
    """One whole-number label of 0 or more per image, as int64; -1 stands for a missing label."""
    labels = torch.as_tensor(labels)
    if labels.shape != (count,):
        raise UserError(
            f"{name} has shape {tuple(labels.shape)} for {count} images; give one label per image."
        )
    if labels.is_floating_point() or labels.dtype == torch.bool:
        raise UserError(f"{name} holds {labels.dtype}; give whole numbers, one per class.")
    missing = (labels < 0).nonzero()
    if len(missing):
        raise UserError(
            f"{name}: {len(missing)} of {count} images have no label (the first is row {int(missing[0])}). Label "
            f"them or leave them out."
        )
    return labels.to(torch.int64)


def check_positive(**values: float) -> None:
    """Refuse any named value that is not above 0."""
    for name, value in values.items():
        if not value > 0:
            raise UserError(f"{name}={value} must be above 0.")


def some_ids(values: list[int]) -> str:
    """The first few of them, in words."""
    return f"id{'s' if len(values) > 1 else ''} {few(map(str, values), 5)}"
