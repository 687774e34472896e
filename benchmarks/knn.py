"""k-NN of ImageNet's size: time and extra memory of the whole, and a sample of it against scikit-learn.

    python benchmarks/knn.py                                            # 50,000 against 1,281,167, k = 200
    python benchmarks/knn.py --train 40000 --test 1000 --sample 200     # a minute's try
    python benchmarks/knn.py --skip-whole                               # the sample alone

scikit-learn's brute force runs twice: by cosine, and as Euclidean distance of normalised features, which
ranks the same and is its fastest path.
"""

from __future__ import annotations

from functools import partial

import torch
from _report import extra_memory, options, report, seconds
from sklearn.neighbors import NearestNeighbors
from torch import Tensor
from torch.nn.functional import normalize

from adasim.eval import knn_accuracy


def clustered(n: int, dim: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Features around one centre per class, made in place so that they raise no peak of memory."""
    centres = torch.randn(classes, dim, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    features = torch.empty(n, dim)
    for start in range(0, n, 65536):
        part = features[start : start + 65536].normal_(generator=generator)
        part.mul_(1.5).add_(centres[labels[start : start + 65536]])
    return features, labels


def main() -> None:
    args = options(
        __doc__, train=1_281_167, test=50_000, dim=384, classes=1000, k=200, sample=2048, skip_whole=False
    )

    train, train_labels = clustered(args.train, args.dim, args.classes, seed=1)
    test, test_labels = clustered(args.test, args.dim, args.classes, seed=2)
    sample, sample_labels = test[: args.sample], test_labels[: args.sample]
    rows: list[dict[str, str | int | float]] = []
    once = partial(seconds, repeats=1, warm_up=False)
    ours = partial(knn_accuracy, train, train_labels, k=args.k)
    if not args.skip_whole:
        time, memory = extra_memory(lambda: once(partial(ours, test, test_labels)))
        rows.append({"what": "adasim, all", "queries": len(test), "seconds": time, "extra GB": memory})
    reference = once(partial(ours, sample, sample_labels))
    rows.append({"what": "adasim, sample", "queries": len(sample), "seconds": reference})
    unit, unit_sample = normalize(train).numpy(), normalize(sample).numpy()
    for metric in ("euclidean", "cosine"):
        theirs = NearestNeighbors(n_neighbors=args.k, algorithm="brute", metric=metric).fit(unit)
        time = once(partial(theirs.kneighbors, unit_sample))
        name = f"scikit-learn, {metric}"
        rows.append({"what": name, "queries": len(sample), "seconds": time, "times ours": time / reference})
    report("knn", vars(args), rows)


if __name__ == "__main__":
    main()
