"""`adasim eval knn`"""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from adasim.eval.evaluations.base import Evaluation, with_changes
from adasim.eval.extractor import Extractor
from adasim.eval.protocols.knn import knn_accuracy
from adasim.eval.report import Report
from adasim.options import KnnOptions
from adasim.registry import EVALUATIONS

PUBLISHED_K = (10, 20, 100, 200)


@EVALUATIONS.register("knn")
@dataclass(kw_only=True)
class Knn(KnnOptions, Evaluation):
    """Measures what its options, in adasim/options.py, ask for."""

    def run(self, extractor: Extractor) -> Report:
        split = extractor.open_split(self)
        found = extractor.split_features(split)
        ks = self.k
        if ks is None:  # those that the training set allows
            ks = tuple(k for k in PUBLISHED_K if k <= len(found.train_labels)) or PUBLISHED_K[:1]
        scores = knn_accuracy(
            found.train.values, found.train_labels, found.test.values, found.test_labels, k=ks
        )
        table = Table("k", "top-1", "top-5", box=None, padding=(0, 2))
        for k, score in scores.items():
            table.add_row(str(k), f"{score.top1:.2f}", f"{score.top5:.2f}", style="bold" if k == 20 else "")
        main = 20 if 20 in scores else max(scores)
        encoder = extractor.encoder
        result = extractor.result(
            "knn",
            scores[main].top1,
            setting=with_changes(f"k={main}", size=(encoder.transform.size, encoder.usual_size)),
            metrics={f"top{n}_k{k}": score[i] for k, score in scores.items() for i, n in enumerate((1, 5))},
            data=split,
            settings={"k": list(scores), "temperature": 0.07, "size": encoder.transform.size},
        )
        return Report(results=(result,), title=extractor.title("k-NN", split), table=table)
