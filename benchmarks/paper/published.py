"""The paper's own figures (arXiv 2303.13606), in percent: what ours stand beside."""

from typing import Any

MAIN: dict[str, dict[str, Any]] = {
    "simsiam": {"standard": (57.1, 68.0), "nearest": (56.2, 65.9), "adasim": (57.9, 68.1)},
    "dino": {"standard": (50.2, 60.0), "nearest": None, "adasim": (50.7, 60.1)},
    "dino-vit": {"standard": (68.4, 71.9), "nearest": None, "adasim": (70.1, 73.3)},
}
"""k-NN and linear accuracy on ImageNet-1k; None is a collapse. SimSiam and DINO with two crops on a ResNet-50 for 100
epochs, DINO on a ViT-S/16 for 800."""

ORACLE = {"oracle:p=0": (74.3, 75.8), "oracle:p=0.5": (74.9, 76.3), "standard": (68.4, 71.9)}
"""Likewise, with partners of the image's own class. The paper does not name the encoder; `standard` is ViT-S/16's."""

ABLATION = {
    "standard": (68.4, 71.9),
    "adasim:tau=0.05": (68.8, 72.4),
    "adasim:tau=0.1": (69.0, 72.6),
    "adasim": (70.1, 73.3),
    "adasim:tau=0.4": (69.8, 73.2),
    "adasim:window=1": (69.3, 72.6),
    "adasim:window=50": (69.4, 72.7),
    "adasim:k=2": (69.4, 72.8),
    "adasim:k=5": (70.1, 73.0),
    "adasim:k=10": (69.1, 72.5),
    "adasim:k=20": (68.4, 72.2),
}
"""One setting changed at a time from tau = 0.2, w = 10, K = 3 (ViT-S/16, 800 epochs); tau = 0 is the baseline."""

FEWSHOT: dict[str, dict[str, Any]] = {
    "simsiam": {"standard": 76.39, "nearest": 75.63, "adasim": 76.75},
    "dino": {"standard": 72.80, "nearest": None, "adasim": 72.97},
    "dino-vit": {"standard": 81.55, "nearest": None, "adasim": 82.67},
}
"""5-way 5-shot accuracy, the mean of eight data sets."""

SEGMENTATION: dict[str, dict[str, Any]] = {"dino-vit": {"standard": 62.1, "nearest": None, "adasim": 62.4}}
"""Mean IoU of three data sets after pretraining on ImageNet-1k; after COCO 48.1 and 51.1."""

RUNTIME = {128: (0.256, 0.270), 256: (0.480, 0.488)}
"""Seconds a step by batch on each GPU, without and with the memory (ViT-S/16 on four MI250X)."""
