"""The one way from images to features: a frozen encoder, one centred view, and a cache on disk.

    cache = FeatureCache(run / "features")
    features = cache.features(backbone, images, EvalTransform.for_run(config))
    features.values, features.labels      # (n, D) and (n,), readable images only

A pass over the data is kept under the hash of the weights, the data, the transform and the kind of feature, so
that several evaluations cost one, and an interrupted one goes on where it stopped. What is damaged counts as absent;
the cache may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypedDict, Unpack

import torch
from timm.models import VisionTransformer
from torch import Tensor, nn

from adasim.data import ImageSet
from adasim.data.pool import read_batches
from adasim.dist.devices import image_layout
from adasim.dist.processes import ALONE, Distributed
from adasim.eval.feature_files import Parts, read_features, write_features
from adasim.models import Backbone
from adasim.models.io import hash_tensors
from adasim.models.transform import EvalTransform
from adasim.util.errors import UserError
from adasim.util.files import remove
from adasim.util.terminal import progress_bar

FeatureKind = Literal["pooled", "linear-dino"]
"""`pooled`: the encoder's own output. `linear-dino`: what DINO's linear layer sees (docs/evaluation.md)."""

MAX_UNREADABLE = 0.01
"""Above this share of unreadable images an evaluation stops, as pretraining does."""

_VERSION = 2  # of the features that a transform gives: features kept by earlier versions are made anew
_Batch = tuple[Tensor, Tensor, dict[int, str]]  # ids, pixels, and {id: where and why} of those not readable


class How(TypedDict, total=False):
    """How images are read and encoded: arguments of `extract`, which others pass on."""

    device: torch.device | str
    batch_size: int
    workers: int
    progress: bool


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
        parts: a folder where to keep what is done so far, and to go on from.
        ranks: the processes that make them together; each calls this.
    """
    backbone.to(device)
    features, failures = torch.empty(0), {} if unreadable is None else unreadable
    done, keeps = 0, None
    if parts is not None:
        keeps = Parts(parts, f"in batches of {batch_size} on {torch.device(device).type}")
        before, failed = keeps.load()
        done = min(ranks.gather(len(before)))  # a process may see less of what was kept
        failures.update({i: why for i, why in failed.items() if i < done})
        if done:
            features = torch.full((len(images), before.shape[1]), torch.nan)
            features[:done] = before[:done]
    keeps = keeps if ranks.is_main else None
    mine = torch.arange(done, len(images)).split(batch_size)[ranks.rank :: ranks.world]
    made = batches(images, transform, mine if done < len(images) else [], workers)
    shown = progress and ranks.is_main
    with frozen(backbone), progress_bar(f"{images.name}: features", len(images), shown) as advance:
        advance(done)
        try:
            while done < len(images):
                ids, pixels, failed = next(made, (torch.empty(0, dtype=torch.int64), torch.empty(0), {}))
                part = torch.empty(0, 0)
                if len(pixels):
                    with torch.inference_mode():
                        views = transform.normalise(pixels.to(device))
                        part = encode(backbone, views, kind).float().cpu()
                ids, part, failed = _of_all_ranks(ranks, ids, part, failed)
                if failed and unreadable is None:
                    with ranks.raise_on_all():
                        raise UserError(
                            f"An image cannot be read: {next(iter(failed.values()))}. Repair or remove it."
                        )
                failures.update(failed)
                if not len(features) and len(part):
                    features = torch.full((len(images), part.shape[1]), torch.nan)
                if len(part):
                    features[ids] = part
                done += len(ids) + len(failed)
                advance(len(ids) + len(failed))
                if keeps is not None:
                    keeps.offer(features, done, failures)
        except BaseException:
            if keeps is not None:
                keeps.keep(features, done, failures)
            raise
    if not len(features):
        raise UserError(f"Not one of the {len(images)} images of {images.name} can be read.")
    return features


def _of_all_ranks(
    ranks: Distributed, ids: Tensor, part: Tensor, failed: dict[int, str]
) -> tuple[Tensor, Tensor, dict[int, str]]:
    """Ids (n,) and features (n, D) of all ranks, and what none of them could read."""
    if ranks.world == 1:
        return ids, part, failed
    shapes, failures = zip(*ranks.gather((tuple(part.shape), failed)), strict=True)
    counts, widths = zip(*shapes, strict=True)
    failed = {i: why for some in failures for i, why in some.items()}
    if not sum(counts):
        return ids, part, failed
    part = part if len(part) else part.new_empty(0, max(widths))
    return ranks.gather_rows(ids, counts), ranks.gather_rows(part, counts), failed


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


def require_finite(features: Tensor, backbone: Backbone) -> None:
    """A sentence with the cause if features (B, ...) of images that could be read are not finite."""
    low, high = features.flatten(1).aminmax(dim=1)  # both are NaN where any value is
    wrong = int((~(low.isfinite() & high.isfinite())).sum())
    if not wrong:
        return
    weights = backbone.net.state_dict().items()
    broken = [name for name, tensor in weights if not tensor.isfinite().all()]
    cause = (
        "its weights are finite, so they are too large, or mean and std of its normalisation are not its own. Check "
        "where they come from"
    )
    if broken:
        cause = (
            f"{len(broken)} of its {len(weights)} tensors of weights are not finite either, such as {broken[0]}. Its "
            f"file is damaged or its training diverged: use another"
        )
    raise UserError(
        f"{backbone.spec['name']} gives features that are not finite for {wrong:,} of {len(features):,} images: "
        f"{cause}."
    )


def require_size(backbone: Backbone, size: int) -> None:
    """A sentence if the encoder cannot look at images of this side: a black one is tried."""
    pixels = torch.zeros(1, 3, size, size, device=backbone.device)
    try:
        with frozen(backbone), torch.inference_mode():
            backbone(pixels)
    except (AssertionError, RuntimeError, ValueError) as error:  # each of timm's nets says it in its own way
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise UserError(
            f"{backbone.spec['name']} cannot look at images of {size} x {size} pixels ({reason}). Choose another "
            f"--size."
        ) from None


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


def batches(
    images: ImageSet, transform: EvalTransform, wanted: Sequence[Tensor], workers: int
) -> Iterator[_Batch]:
    """(ids, 8-bit views, {id: where and why} of images that cannot be read) of each of the batches, each of which has
    images that follow one another."""
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


@dataclass
class Features:
    """Features of the readable images of a data set, with the labels that belong to them."""

    values: Tensor
    """(n, D), float32."""
    ids: Tensor
    """(n,): which images of the data set these are."""
    labels: Tensor | None
    """(n,), int64."""
    unreadable: dict[int, str]
    """{id: where and why} of the images left out."""

    def of(self, ids: Tensor) -> Features:
        """The features of some images of the data set."""
        kept = torch.isin(self.ids, ids)
        if kept.all():
            return self
        labels = None if self.labels is None else self.labels[kept]
        return Features(self.values[kept], self.ids[kept], labels, self.unreadable)


class FeatureCache:
    """Features on disk; `FeatureCache(None)` remembers nothing."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._weights: tuple[Backbone, str] | None = None

    def features(
        self,
        backbone: Backbone,
        images: ImageSet,
        transform: EvalTransform,
        *,
        kind: FeatureKind = "pooled",
        max_unreadable: float = MAX_UNREADABLE,
        ranks: Distributed = ALONE,
        **how: Unpack[How],
    ) -> Features:
        """The features of `images`, from the cache or by `extract`; unreadable images are left out by row.

        A damaged file counts as absent. A greater share of unreadable images than `max_unreadable` is refused. All
        ranks read the cache, and the first one writes it.
        """
        array = images.as_array()
        if array is not None:
            transform = transform.for_shape(array.shape[-2], array.shape[-1])
        path = self._path(backbone, images, transform, kind)
        known = None if path is None else read_features(path)
        if known is not None and len(known[0]) != len(images):
            known = None
        if ranks.all_any(known is None) or known is None:
            unreadable: dict[int, str] = {}
            parts = None if path is None else path.with_suffix(".parts")
            values = extract(
                backbone,
                images,
                transform,
                kind=kind,
                unreadable=unreadable,
                parts=parts,
                ranks=ranks,
                **how,
            )
            if path and parts and ranks.is_main and write_features(path, values, unreadable):
                with suppress(OSError):
                    remove(parts)
        else:
            values, unreadable = known
        if len(unreadable) > max_unreadable * len(images):
            some = "; ".join(list(unreadable.values())[:3])
            raise UserError(
                f"{len(unreadable)} of the {len(images)} images of {images.name} cannot be read: {some}. "
                f"Repair or remove them."
            )
        kept = torch.ones(len(images), dtype=torch.bool)
        kept[list(unreadable)] = False
        ids = kept.nonzero()[:, 0]
        labels = None if images.labels is None else images.labels[ids]
        found = Features(values if kept.all() else values[ids], ids, labels, unreadable)
        require_finite(found.values, backbone)
        return found

    def _path(self, backbone: Backbone, images: ImageSet, transform: EvalTransform, kind: str) -> Path | None:
        if self.folder is None:
            return None
        if self._weights is None or self._weights[0] is not backbone:
            self._weights = (backbone, weights_hash(backbone))
        facts = {
            "version": _VERSION,
            "weights": self._weights[1],
            "data": images.cache_key(),
            "transform": asdict(transform),
            "what": kind,
        }
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.folder / f"{name[:32]}.safetensors"


def weights_hash(backbone: Backbone) -> str:
    """SHA-256 over the encoder's description and weights."""
    return hash_tensors(backbone.net.state_dict(), json.dumps(backbone.spec, sort_keys=True))
