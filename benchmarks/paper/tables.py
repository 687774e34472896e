"""Which cells a table of the paper has. A cell is a run: method, arm and seed."""

from __future__ import annotations

from typing import NamedTuple


class Cell(NamedTuple):
    """One run of a table."""

    method: str
    arm: str
    seed: int

    def __str__(self) -> str:
        return f"{self.method}/{self.arm}/{self.seed}"

    @classmethod
    def read(cls, text: str) -> Cell:
        """The inverse of str()."""
        method, arm, seed = text.split("/")
        return cls(method, arm, int(seed))


def read_arm(arm: str) -> tuple[str, dict[str, str]]:
    """An arm's pair policy, and which of its settings are changed to what.

    >>> read_arm("adasim:k=3,tau=0.1")
    ('adasim', {'k': '3', 'tau': '0.1'})
    """
    pairs, _, changes = arm.partition(":")
    return pairs, dict(change.split("=") for change in changes.split(",") if change)


def cells(methods: str, arms: str, seeds: int = 1) -> list[Cell]:
    """All of these methods with all of these arms, seed by seed."""
    return [Cell(m, a, s) for s in range(seeds) for m in methods.split() for a in arms.split()]


CONTROLS = " ".join(f"control:partner={rule}" for rule in ("random", "right", "only-right", "only-wrong"))
TABLES: dict[str, list[Cell]] = {
    "main": [
        *cells("simsiam dino", "standard adasim", 3),
        *cells("simsiam dino", "nearest"),
        *cells("dino-vit", "standard nearest adasim"),
    ],
    "oracle": cells("simsiam", "oracle:p=0.5 oracle:p=0"),
    "policies": [
        *cells("simsiam", "confident", 3),
        *cells("simsiam", "confident:partners=10 confident:share=0.3,share_end=0"),
    ],
    "ablation": [
        *cells("simsiam-short", "standard adasim"),
        *cells("simsiam-short", "adasim:tau=0.05 adasim:tau=0.1 adasim:tau=0.4"),
        *cells("simsiam-short", "adasim:window=1 adasim:window=10 adasim:window=20"),
        *cells("simsiam-short", "adasim:k=3 adasim:k=10"),
    ],
    "collapse": cells("dino-uncentred", "standard"),
    "latent": cells("dino-65536", "nearest:space=latent"),
    "contrast": [*cells("nnclr", "standard"), *cells("infonce", "standard nearest adasim")],
    "more": [*cells("simsiam-more", "standard confident", 3), *cells("simsiam-more", "adasim")],
    "late": [
        *cells("late", f"standard adasim nearest {CONTROLS}", 3),
        *cells("late", "control:partner=right,nearest=0,farthest=0.1 control:partner=right,nearest=0.9", 3),
        *cells("late", "control:partner=right,share=0.05 control:partner=right,share=0.5", 3),
        *cells("late", "control:partner=any-right", 3),
        # What these predict: more partners, or farther ones, behind the same gate; the paper's w and K for ResNets.
        *cells("late", "adasim:k=20,tau=1 control:partner=two-steps adasim:window=1,k=10", 3),
    ],
    "quality": cells("late-low-3 late-low-12 late-low-40", "standard adasim control:partner=random", 2),
    "glyphs": [
        *cells("glyphs-0 glyphs-1", "standard adasim control:partner=random control:partner=right", 3),
        *cells("glyphs-dino-0 glyphs-dino-1", "standard adasim", 3),
    ],
    "partners": cells("simsiam", CONTROLS, 3),
    "continued": [
        *cells("cifar-96 clothes", "standard adasim nearest control:partner=random", 2),
        *cells("cifar-96 clothes", "control:partner=right"),
    ],
    "weak": cells("simsiam-weak", "standard adasim confident oracle:p=0.5"),
}
"""tau = 0 of the ablation is the arm `standard`. The pairs `confident` were removed after they had lost; their
results are kept."""


def transferred() -> list[Cell]:
    """The cells whose runs are also measured by few-shot and segmentation: all arms of the long runs."""
    return [cell for table in ("main", "oracle", "policies") for cell in TABLES[table]]
