"""One tree of dataclasses describes a run: typed once, saved with the run, and the command line's `--help`.

Every field has a docstring under it, and its range in its annotation. `Config` refuses a value that is wrong by
itself; `Config.check` refuses what only the data can show to be wrong (too few images, no labels).
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from types import NoneType
from typing import Annotated, Any, Literal

import tyro

from adasim.registry import METHODS, PAIRS
from adasim.util.errors import UserError
from adasim.util.fields import Count, Natural, NonNegative, Pixels, Range, Share, check_fields, check_name

FIXED = tyro.conf.Suppress
"""Of a field that belongs to a published method or recipe: set in Python or by a recipe, not on the command line.
For those of `ViewsConfig`, a recipe takes the values of its method in options.py, not the defaults below."""


def cosine(start: float, end: float, position: float, length: float) -> float:
    """Half a cosine from `start` at position 0 to `end` at position `length`."""
    return end + (start - end) * (1 + math.cos(math.pi * position / length)) / 2


@dataclass(kw_only=True)
class DataConfig:
    """Which images, and how they are read."""

    source: Annotated[str, tyro.conf.arg(name="data", prefix_name=False)] = ""
    """A folder of images, an .npz file, `hf:NAME` or `hf:FOLDER` (Hugging Face datasets), or `synthetic[:COUNT]`
    (generated images: what the demo and the desk recipes use when nothing is named)."""
    workers: Natural | Literal["auto"] = "auto"
    """Loader processes for images that are not kept in memory; 0 reads in the training process. `auto`: this
    process's share of the machine's cores less one, at most 16. Any number gives the same run."""
    max_unreadable: Share = 0.01
    """Stop when more than this share of the images cannot be read; below it they are replaced and counted."""
    exclude: Annotated[str, tyro.conf.arg(prefix_name=False, metavar="VERDICTS.csv")] = ""
    """Leave out the images that this file rejects: verdicts exported from the page of `adasim explore`. A resume
    reads it again, and refuses another selection."""
    labels: Annotated[str, tyro.conf.arg(prefix_name=False, metavar="VERDICTS.csv")] = ""
    """Take the new labels of this file, which may be the same one, instead of those that the images come with: for
    accuracies on the way, the table at the end and the pairs `oracle`. A resume refuses other labels."""
    verify: Annotated[bool, tyro.conf.arg(name="verify-data", prefix_name=False)] = False
    """Read every file before training and keep a hash of all its bytes; on a resume, compare them all. Without it,
    modification times and the contents of a sample are compared."""


@dataclass(kw_only=True)
class ViewsConfig:
    """How an image becomes two (or more) training views."""

    in_memory: Annotated[bool, FIXED] = True
    """Keep small images of one size in memory (up to 64 pixels and 2 GB in all) and crop them there, in whole
    batches. All others, and these without it, are read and cropped by loader processes. Views differ by rounding
    alone."""
    reduced_jpeg: bool = True
    """Decode a JPEG at 1/4 or 1/8 of its size where every crop of it stays at least as large as its view: twice as
    fast for photos of cameras, whose pixels it changes a little (docs/data.md)."""
    size: Pixels = 224
    """Side of the global views in pixels."""
    scale: tuple[float, float] = (0.4, 1.0)
    """Share of the image's area that a global crop covers."""
    local_crops: Natural = 0
    """Small extra views for the student alone (multi-crop); 0 as in the paper."""
    local_size: Pixels | None = None
    """Side of the local views in pixels; by default about 3/7 of the global ones': 96 beside 224."""
    local_scale: Annotated[tuple[float, float], FIXED] = (0.05, 0.4)
    """Share of the image's area that a local crop covers."""
    interpolation: Annotated[Literal["bicubic", "bilinear"], FIXED] = "bicubic"
    """How crops are resized."""
    jitter: Annotated[tuple[float, float, float, float], FIXED] = (0.4, 0.4, 0.2, 0.1)
    """Ranges of brightness, contrast, saturation and hue; four views in five are jittered."""
    blur_p: Annotated[tuple[Share, Share, Share], FIXED] = (1.0, 0.1, 0.5)
    """Probability of a blur of view 1, of view 2 and of a local view."""
    solarize_p: Annotated[tuple[Share, Share], FIXED] = (0.0, 0.2)
    """Probability of a solarisation of view 1 and of view 2."""
    flip: Share = 0.5
    """How often a view is mirrored; 0 where left and right matter, as in text."""
    color: Share = 1.0
    """Strength of the colour jitter and greyscale; 0 switches both off."""
    blur: Share = 1.0
    """Multiplies the blur probabilities; 0 switches blur off (wise below 64 pixels)."""
    solarize: Annotated[Share, FIXED] = 1.0
    """Multiplies the solarisation probabilities; 0 switches it off."""
    mean: tuple[Share, ...] = (0.485, 0.456, 0.406)
    """Channel means taken off at the end; ImageNet's by default."""
    std: tuple[Annotated[float, Range(0.001, 1)], ...] = (0.229, 0.224, 0.225)
    """Channel deviations divided by at the end; ImageNet's by default."""

    def check(self) -> None:
        """Refuse what no annotation can say."""
        if self.local_crops and self.local_side > self.size:
            raise UserError(
                f"views.local_size={self.local_size} is more than views.size={self.size}, and local views are the "
                f"small ones. Lower --views.local-size."
            )
        for name in ("scale", "local_scale"):
            low, high = getattr(self, name)
            if not 0 < low <= high <= 1:
                raise UserError(f"views.{name}={low, high} must satisfy 0 < low <= high <= 1.")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, 3):
                raise UserError(
                    f"views.{name}={getattr(self, name)} must be one value, or three: red, green, blue."
                )

    @property
    def local_side(self) -> int:
        """Side of the local views: as set, or 3/7 of the global ones' to the nearest multiple of 16."""
        return self.local_size or min(self.size, max(16, 16 * round(self.size * 3 / 7 / 16)))


@dataclass(kw_only=True)
class ModelConfig:
    """The encoder."""

    name: str = "vit_small"
    """`vit_tiny`, `vit_small`, `vit_base`, `resnet18`, `resnet50`, `resnet_tiny`, `vit_mini`, or any timm name."""
    patch_size: Count = 16
    """Side of a ViT's patches in pixels."""
    small_stem: bool = False
    """ResNets: a 3x3 stem without pooling, for images of 32 to 64 pixels."""
    zero_init_residual: Annotated[bool, FIXED] = False
    """ResNets: start every residual branch at zero, as SimSiam published (and DINO did not). With one block per
    stage that leaves too little to start from: keep it off for `resnet_tiny`."""
    drop_path: Annotated[float, Range(0, 0.99), FIXED] = 0.1
    """Stochastic depth of the student (linear from 0 over the blocks); the teacher has none."""
    init: str = ""
    """Weights that the encoder starts from: an earlier run, a file (.safetensors, .pth), a folder with config.json
    (of timm or transformers), hf-hub:OWNER/NAME, or a timm name, whose weights are downloaded. Empty: fresh ones."""
    freeze_norm: bool = False
    """Batch norms of the encoder use the statistics that `init` brought, as in evaluation, and leave them as they
    are: those of cropped and coloured views would spoil a good encoder."""


@dataclass(kw_only=True)
class NeighborsConfig:
    """The neighbour memory and the distribution partners are drawn from (the paper's w, K and tau)."""

    window: Count = 10
    """w: how many epochs of top-K lists are averaged."""
    k: Count = 3
    """K: length of a top-K list, and size of the distribution's support."""
    tau: NonNegative = 0.2
    """Temperature of p_win; 0 means standard pairs."""
    support: Literal["topk", "union"] = "topk"
    """`topk`: the K best of the window's union, as released. `union`: all of it, as printed in the paper."""
    timing: Literal["previous", "current"] = "previous"
    """`previous`: partners come from the w epochs before this one, as released. `current`: the window includes
    this epoch (Algorithm 1 as printed); the partner is drawn after the image's own forward pass."""
    view: Literal["first", "second", "mean"] = "first"
    """Whose feature is looked up and cached for an image: view 1's, view 2's (which shows the partner), or the mean
    of both, each of unit norm; as the released code's nn_rep_type."""
    cache: Literal["auto", "float32", "float16"] = "auto"
    """Type of the feature cache; `auto` is float16 on an accelerator and float32 on a CPU."""
    watch: bool = False
    """Keep the memory beside pairs that do not need it (standard, oracle), to log the same neighbour metrics as a run
    with AdaSim pairs. It changes nothing that is learnt, and costs the memory's room and time."""
    oracle_p: Share = 0.5
    """Pairs `oracle` only: probability of a standard pair at the last epoch (falls linearly from 1)."""

    def check(self) -> None:
        """Refuse what no annotation can say."""
        if 0 < self.tau < 1e-6:
            raise UserError(
                f"neighbors.tau={self.tau} must be 0 (standard pairs), or 1e-6 or more. The paper uses 0.2."
            )


@dataclass(kw_only=True)
class OptimConfig:
    """The optimiser and its schedules."""

    name: Literal["adamw", "sgd"] = "adamw"
    """AdamW, or SGD with momentum 0.9."""
    lr: Annotated[float, Range(1e-12)] = 5e-4
    """Peak learning rate per 256 images; the run uses lr * batch_size / 256."""
    min_lr: Annotated[NonNegative, FIXED] = 1e-5
    """Where the cosine ends (not scaled by the batch)."""
    warmup_epochs: Natural = 10
    """Epochs of linear warm-up from 0."""
    encoder_lr: Share = 1.0
    """The encoder's learning rate as a share of the heads': below 1 where it starts from trained weights."""
    head_epochs: Natural = 0
    """Epochs at the start in which the heads learn and the encoder waits: new heads would spoil a trained one."""
    lr_every: Annotated[Literal["step", "epoch"], FIXED] = "step"
    """Whether the cosine moves every step (DINO) or every epoch (SimSiam)."""
    weight_decay: float = 0.04
    """Weight decay at the start."""
    weight_decay_end: float = 0.4
    """Weight decay at the end of its cosine."""
    decay_all: Annotated[bool, FIXED] = False
    """Decay biases and 1-D parameters too (SimSiam); DINO leaves them out."""
    clip_grad: NonNegative = 0.0
    """Clip each parameter tensor's gradient to this norm; 0 is off."""


@dataclass(kw_only=True)
class SaveConfig:
    """Checkpoints and logs."""

    every_minutes: NonNegative = 10.0
    """Save when this much time has passed since the last checkpoint; 0 saves after every step."""
    every_epochs: Natural = 0
    """Save also after every so many epochs; 0 leaves it to the minutes. A run always saves when it ends or is
    asked to stop."""
    encoder_every: Natural = 0
    """Keep the encoder of every so many epochs, as RUN/encoders/epoch-0100.safetensors, and save then, too; 0 keeps
    the last one alone."""
    keep: Annotated[Count, FIXED] = 2
    """How many checkpoints to keep; the newest valid one is never deleted."""
    log_every: Count = 50
    """Steps between two lines of metrics."""
    log: Annotated[Literal["files", "wandb", "mlflow"], tyro.conf.arg(prefix_name=False)] = "files"
    """Where metrics go beside metrics.jsonl and TensorBoard in the run folder: `wandb` (Weights & Biases) or
    `mlflow`, as their own environment variables say; a resumed run goes on in the same place."""


@dataclass(kw_only=True)
class EvalConfig:
    """Evaluation during pretraining."""

    every: Natural = 0
    """Measure k-NN accuracy every so many epochs (needs labels); 0 is never."""


@dataclass(kw_only=True)
class Config:
    """A whole pretraining run."""

    recipe: Annotated[str, FIXED] = "custom"
    """Name of the recipe this configuration started from."""
    method: str = "dino"
    """Which method: `dino`, `simsiam`, `nnclr`, or one from a plug-in."""
    pairs: str = "adasim"
    """Who is whose partner: itself (`standard`), always the best other image (`nearest`: +NN), a draw from p_win
    (`adasim`), one of the same class (`oracle`), or as a plug-in has it."""
    epochs: Count = 100
    """Passes over the data."""
    batch_size: Count = 256
    """Images per step, over all processes."""
    micro_batch: Count | Literal["auto"] = "auto"
    """Images that a process takes through the network at once; their gradients add up to the batch's. `auto`: all of
    them, or as many as fit into memory where the network has no batch norm, which a split would change."""
    seed: int = 0
    """Random seed."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, `mps`, or `auto`: a GPU if there is one, but on a Mac the CPU."""
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = "fp32"
    """Of the networks on an accelerator; a CPU always runs fp32. bf16 and fp16: autocast; fp16 scales the loss, and
    becomes fp32 on devices that cannot. tf32: fp32 with shortened factors in matrix products, on NVIDIA's GPUs."""
    compile: bool = False
    """Compile the encoders with torch.compile: slow first steps, faster ones after. Rounding differs slightly."""
    deterministic: bool = False
    """The same bits from every run, and from one that was resumed, on the same GPUs, by slower algorithms for
    attention and convolutions; where torch has none the run ends. A CPU gives the same bits anyway."""
    data: DataConfig = field(default_factory=DataConfig)
    views: ViewsConfig = field(default_factory=ViewsConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    settings: Annotated[Any, tyro.conf.Suppress] = None
    """The method's own settings, of its class `Settings`: on the command line and in config.json under the method's
    name (`--dino.out-dim`)."""
    pair_settings: Annotated[Any, tyro.conf.Suppress] = None
    """The pair policy's own settings, if it has a class `Settings`: likewise under the policy's name
    (`--nearest.space`)."""
    neighbors: NeighborsConfig = field(default_factory=NeighborsConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        self.check_values()

    def check_values(self) -> None:
        """Refuse values that are wrong by themselves; called again before a run, since fields may be assigned."""
        check_fields(self)
        shown = {}
        for section, (kind, registry) in OWN_SETTINGS.items():
            shown[section] = name = getattr(self, kind)
            check_name(kind, name, registry.names())
            wanted, settings = registry.outline(name).Settings, getattr(self, section)
            if settings is None and wanted is not None:
                setattr(self, section, wanted())
            elif not isinstance(settings, wanted or NoneType):
                takes = f"settings of the class {wanted.__name__}" if wanted else "no settings"
                given = type(settings).__name__
                raise UserError(f"{kind}={name} takes {takes}, not {given}. None means the defaults.")
        for section, value in vars(self).items():
            if dataclasses.is_dataclass(value):
                check_fields(value, f"{shown.get(section, section)}.")
        self.views.check()
        self.neighbors.check()

    def check(self, num_images: int, has_labels: bool) -> None:
        """Refuse, before anything is written, what this data set makes impossible."""
        policy, source = PAIRS[self.pairs], self.data.source
        if self.batch_size > num_images:
            fits = 1 << max(1, (num_images // 4).bit_length() - 1)
            raise UserError(
                f"batch_size={self.batch_size} is more than the {num_images} images of {source}. Use --batch-size "
                f"{fits}, say, or let `adasim pretrain photos` choose."
            )
        if self.optim.warmup_epochs > self.epochs:
            raise UserError(
                f"optim.warmup_epochs={self.optim.warmup_epochs} is more than epochs={self.epochs}. Lower it with "
                f"--optim.warmup-epochs, or raise --epochs."
            )
        if self.optim.head_epochs >= self.epochs:
            raise UserError(
                f"optim.head_epochs={self.optim.head_epochs} leaves the encoder none of the {self.epochs} epochs. "
                f"Lower --optim.head-epochs or raise --epochs."
            )
        for name, wanted in (
            (f"pairs={self.pairs}", policy.needs_labels),
            (f"eval.every={self.eval.every}", self.eval.every),
        ):
            if wanted and not has_labels:
                raise UserError(
                    f"{name} needs labels and {source} has none. Sort the images into one folder per class, or leave "
                    f"it out."
                )
        METHODS[self.method].check(self)
        policy.check(self)
        if (policy.draws_from_memory or self.neighbors.watch) and self.neighbors.k > num_images:
            raise UserError(
                f"neighbors.k={self.neighbors.k} is more than the {num_images} images of {source}. Lower it."
            )

    @property
    def peak_learning_rate(self) -> float:
        """The linear scaling rule: `lr` is per 256 images of the whole batch."""
        return self.optim.lr * self.batch_size / 256

    def learning_rate(self, step: int, steps_per_epoch: int) -> float:
        """Linear warm-up from 0 to the peak, which its last step reaches, then a cosine to `min_lr` (not scaled).

        The warm-up moves every step, the cosine every step (DINO) or every epoch (SimSiam). Steps count from 0.
        """
        peak, warmup = self.peak_learning_rate, self.optim.warmup_epochs * steps_per_epoch
        if step < warmup:
            return peak * step / max(warmup - 1, 1)
        if self.optim.lr_every == "epoch":
            step -= step % steps_per_epoch
        rest = max(self.epochs * steps_per_epoch - warmup, 1)  # a run may be warm-up and nothing else
        return cosine(peak, self.optim.min_lr, step - warmup, rest)

    def weight_decay(self, step: int, steps_per_epoch: int) -> float:
        """A cosine from `weight_decay` to `weight_decay_end` over the run, every step."""
        return cosine(
            self.optim.weight_decay, self.optim.weight_decay_end, step, self.epochs * steps_per_epoch
        )

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; the settings of the method and of the pair policy stand under their names."""
        values = dataclasses.asdict(self)
        settings, own = values.pop("settings"), values.pop("pair_settings")
        return {**values, self.method: settings, **({} if own is None else {self.pairs: own})}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Config:
        """The inverse of `to_dict`, also after a trip through JSON (tuples became lists)."""
        values = dict(values)
        for section, (kind, registry) in OWN_SETTINGS.items():
            name = values.get(kind, getattr(cls, kind))
            if isinstance(name, str) and isinstance(values.get(name), dict) and name in registry:
                values[section] = _build(registry.outline(name).Settings, values.pop(name), f"{name}.")
        return _build(cls, values, "")


OWN_SETTINGS = {"settings": ("method", METHODS), "pair_settings": ("pairs", PAIRS)}
"""The sections of a `Config` that a method or a pair policy brings: which field names it, and where it is known."""


def _build(cls: Any, values: dict[str, Any], where: str) -> Any:
    known = {f.name: f.default_factory for f in dataclasses.fields(cls)}
    if unknown := sorted(values.keys() - known.keys()):
        raise UserError(f"Unknown field {where}{unknown[0]} in the saved configuration.")
    built = {
        name: _build(known[name], value, f"{where}{name}.")
        if isinstance(value, dict) and isinstance(known[name], type)
        else value
        for name, value in values.items()
    }
    return cls(**built)
