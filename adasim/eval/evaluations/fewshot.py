"""`adasim eval fewshot`"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table

from adasim.data import describe
from adasim.eval.evaluations.base import Evaluation, with_changes
from adasim.eval.extractor import Extractor
from adasim.eval.protocols.fewshot import FewShotAccuracy, fewshot_accuracy
from adasim.eval.report import Report
from adasim.eval.splits import Source, data_name, match_classes, open_all, require_labels
from adasim.options import FewshotOptions
from adasim.registry import EVALUATIONS
from adasim.util.errors import UserError


@EVALUATIONS.register("fewshot")
@dataclass(kw_only=True)
class Fewshot(FewshotOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        sources = self.data or tuple(filter(None, [extractor.encoder.own_source()]))
        if not sources:
            raise UserError("Which images? Name one or several data sets with --data.")
        unbalanced = pick_unbalanced(sources, self.per_class)
        table = Table("data", "images", "accuracy", "95%", box=None, padding=(0, 2))
        results = []
        for source in sources:
            per_class = source in unbalanced
            accuracy, data = self._measure(extractor, source, per_class)
            score, interval = f"{accuracy.mean:.2f}", f"± {accuracy.interval95:.2f}"
            table.add_row(str(data["name"]), f"{data['images']:,}", score, interval)
            results.append(
                extractor.result(
                    "fewshot",
                    accuracy.mean,
                    setting=self._setting(extractor),
                    metrics={"mean": accuracy.mean, "interval95": accuracy.interval95},
                    data=data,
                    settings=self._options()
                    | {"per_class": per_class, "seed": extractor.seed}
                    | {"size": extractor.encoder.transform.size},
                )
            )
        if len(results) > 1:
            mean = sum(result.value for result in results) / len(results)
            table.add_row("average", "", f"{mean:.2f}", "", style="bold")
        what = f"Few-shot, {self.ways}-way {self.shots}-shot, {self.episodes} episodes"
        return Report(results=tuple(results), title=extractor.title(what), table=table)

    def _setting(self, extractor: Extractor) -> str:
        return with_changes(
            f"{self.ways}-way {self.shots}-shot",
            queries=(self.queries, Fewshot.queries),
            episodes=(self.episodes, Fewshot.episodes),
            size=(extractor.encoder.transform.size, extractor.encoder.usual_size),
        )

    def _options(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("ways", "shots", "queries", "episodes")}

    def _measure(
        self, extractor: Extractor, source: Source, per_class: bool
    ) -> tuple[FewShotAccuracy, dict[str, Any]]:
        """The accuracy on all splits of a data set together, and what the data set was."""
        size = extractor.encoder.transform.size
        splits = open_all(source, size=size, exclude=extractor.exclude)
        for images in splits:
            extractor.say(describe(images, used=None))
        classes = sorted({name for images in splits for name in images.classes})
        values, labels, fingerprints = [], [], []
        for images in splits:
            require_labels(images)
            found = extractor.features(images, extractor.encoder.transform.for_fewshot())
            assert found.labels is not None
            values.append(found.values)
            labels.append(match_classes(found.labels, images.classes, classes))
            fingerprints.append(images.fingerprint())
        pool = torch.cat(values)
        accuracy = fewshot_accuracy(
            pool,
            torch.cat(labels),
            **self._options(),
            seed=extractor.seed,
            class_names=classes,
            per_class=per_class,
        )
        name = data_name(source) + (" (per class)" if per_class else "")
        return accuracy, {"name": name, "fingerprint": "+".join(fingerprints), "images": len(pool)}


def pick_unbalanced(sources: Sequence[Source], wanted: Sequence[str] | None) -> list[Source]:
    """The data sets to be scored per class: those named (as with --data, or by their short names), or all."""
    if wanted is None:
        return []
    chosen = [source for source in sources if source in wanted or data_name(source) in wanted]
    known = {name for source in chosen for name in (source, data_name(source))}
    unknown = next((name for name in wanted if name not in known), None)
    if unknown is not None:
        raise UserError(f"--per-class {unknown} is none of the data sets {', '.join(map(str, sources))}.")
    return chosen if wanted else list(sources)
