"""The collapse of an encoder: how far features spread, how many directions they use, and the watch over both.

The watch says in words when self-distillation has stopped telling images apart. It reads three vital signs, each on a
scale that does not depend on the model's size:

- **spread**: deviation of the L2-normalised features, in units of 1/sqrt(D), its value when they fill the
  sphere (SimSiam, section 4.1). 0 means that all features are equal.
- **rank**: RankMe (Garrido et al., 2023), how many directions the features use. 1 means one.
- **entropy** of DINO's teacher, in units of ln(out_dim). 1 is a uniform output, 0 a one-hot one; DINO's
  centring pulls towards the former, its sharpening towards the latter (DINO, section 5.3).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

ALIKE = "The encoder gives nearly the same feature to every image"
FLAT = "The features use only"
TEACHER = "The teacher's output is"
BEGINNINGS = (ALIKE, FLAT, TEACHER)
"""Of the watch's sentences."""
READINGS = ("feature_spread", "rankme", "teacher_entropy_share")
"""Names of the vital signs, as they are logged of every epoch."""
ROWS = 2048
"""RankMe looks at no more features than this: the cost is cubic and the answer settles early."""
_EPSILON = 1e-7  # as published


def feature_spread(features: Tensor) -> Tensor:
    """Deviation of the L2-normalised features (B, D) over the batch, averaged over dimensions, times sqrt(D).

    About 1 when features fill the sphere, 0 when all are equal (collapse).
    """
    unit = F.normalize(features.detach().float(), dim=1)
    return unit.std(dim=0, correction=0).mean() * features.shape[1] ** 0.5


def rankme(features: Tensor) -> float:
    """RankMe (Garrido et al., 2023, equation 1): how many directions the features (N, D) use, between 1 and D.

    The exponential of the entropy of the singular values, which are divided by their sum first. If all features are
    zero, no direction counts as one.

    >>> round(rankme(torch.eye(4)), 2)
    4.0
    """
    values = torch.linalg.svdvals(features.detach().cpu().double())
    total = values.sum()
    if not total > 0:
        return 1.0
    p = values / total + _EPSILON
    return float(torch.exp(-(p * p.log()).sum()))


class CollapseWatch:
    """Reads the vital signs once an epoch (or as often as wished) and returns sentences, usually none.

    Thresholds, with readings of healthy runs of this package (32-pixel images, out_dim 512) beside them:

    - spread below 0.1: a mean cosine above 0.99 between any two images. Untrained ResNets and ViTs: 0.2 to
      0.6, trained ones: 0.5 to 0.6. At once if it was above before, after 5 readings if it never was.
    - rank below 3. Untrained: 8 to 70, trained: 38 to 86 (15 at thirty times the learning rate). Likewise.
    - entropy above 0.999. A healthy DINO run passes through a plateau where centring has removed what all
      images have in common and little else is there yet; it peaked at 0.995 there (ln(out_dim) - 0.03),
      while a run with too warm a teacher (0.5) passed 0.999 in its second epoch. After 3 readings.
    - entropy below 0.05: nearly all mass is on one prototype. A run whose centre was held still (no centring)
      fell below it in its sixth epoch and ended at 0.027. After 3 readings.
    """

    SPREAD, RANK, UNIFORM, ONE_HOT = 0.1, 3.0, 0.999, 0.05

    def __init__(self, out_dim: int | None = None) -> None:
        """`out_dim`: width of DINO's output, None for SimSiam."""
        self.out_dim = out_dim
        self.readings: dict[str, float] = {}
        """The latest vital signs, to be logged."""
        self._good: set[str] = set()
        self._bad_in_a_row: Counter[str] = Counter()

    def update(self, features: Tensor, teacher_entropy: float | None = None) -> list[str]:
        """Read once: features (B, D) of the epoch's last images, and the teacher's mean entropy in nats.

        Returns:
            A sentence for every sign that has just turned bad.
        """
        self.readings = {}
        features = features.detach().float()
        features = features[features.isfinite().all(dim=1)]
        if len(features) >= 16:  # fewer say little about rank or spread
            few = features[:: math.ceil(len(features) / ROWS)]
            self.readings |= {"feature_spread": float(feature_spread(few)), "rankme": rankme(few)}
        if teacher_entropy is not None and self.out_dim is not None and math.isfinite(teacher_entropy):
            self.readings["teacher_entropy_share"] = teacher_entropy / math.log(self.out_dim)
        return self._judge(self.readings, features.shape[1])

    def recall(self, readings: Mapping[str, float | None]) -> None:
        """Take note of what was read in an earlier epoch, in a run that goes on."""
        self._judge({name: value for name, value in readings.items() if value is not None}, 0)

    def _judge(self, readings: Mapping[str, float], width: int) -> list[str]:
        spread, rank, share = (readings.get(name) for name in READINGS)
        said = []
        if spread is not None and self._is_news(ALIKE, spread < self.SPREAD, 1, 5):
            said.append(
                f"{ALIKE}: they vary {spread:.1%} as much as features that fill the sphere. It has collapsed, or "
                f"has not begun to learn. Lower --optim.lr, or try --pairs standard to see whether the pairs are "
                f"the cause."
            )
        if rank is not None and self._is_news(FLAT, rank < self.RANK, 1, 5):
            said.append(
                f"{FLAT} {rank:.1f} of {width} directions (RankMe): most of what could tell images apart is lost. "
                f"Lower --optim.lr or --optim.weight-decay, or make the views harder (a smaller --views.scale)."
            )
        if share is None:
            return said
        entropy = f"its entropy is {share:.2%} of ln({self.out_dim})"
        if self._is_news("uniform", share > self.UNIFORM, 3, 3):
            said.append(
                f"{TEACHER} uniform: {entropy}, so it says the same of every image and there is nothing to learn "
                f"from it. Sharpen it with a lower --dino.teacher-temp, or let the centre follow slower (a higher "
                f"--dino.center-momentum)."
            )
        if self._is_news("one-hot", share < self.ONE_HOT, 3, 3):
            said.append(
                f"{TEACHER} one-hot: {entropy}. If all images share one prototype, this is a collapse. Soften it "
                f"with a higher --dino.teacher-temp, or let the centre follow faster (a lower "
                f"--dino.center-momentum)."
            )
        return said

    def _is_news(self, sign: str, bad: bool, patience: int, patience_at_start: int) -> bool:
        """Whether a sign is to be reported now: after `patience` bad readings in a row, once until it clears.

        The start of a run may look like a collapse and recover, as an untrained network finds all images alike: a
        sign that was never good has more patience.
        """
        self._bad_in_a_row[sign] = self._bad_in_a_row[sign] + 1 if bad else 0
        if not bad:
            self._good.add(sign)
        return self._bad_in_a_row[sign] == (patience if sign in self._good else patience_at_start)
