"""Methods and arms in the words of tables and figures."""

from .tables import read_arm

PAIR_NAMES = {
    "standard": "standard",
    "nearest": "nearest (+NN)",
    "adasim": "AdaSim",
    "confident": "confident (ours)",
    "oracle": "oracle",
}
CONTROL_NAMES = {
    "partner=random": "any image instead",
    "partner=right": "any of the class instead",
    "partner=only-right": "AdaSim, its right partners alone",
    "partner=only-wrong": "AdaSim, its wrong partners alone",
    "partner=any-right": "any of the class, where AdaSim is right",
    "partner=two-steps": "the nearest to AdaSim's partner instead",
    "partner=right,nearest=0,farthest=0.1": "the nearest tenth of the class instead",
    "partner=right,nearest=0.9": "the farthest tenth of the class instead",
    "partner=right,share=0.05": "any of the class, for 5% of the images",
    "partner=right,share=0.5": "any of the class, for 50% of the images",
}
METHOD_NAMES = {
    "simsiam": "SimSiam",
    "dino": "DINO, two crops",
    "dino-vit": "DINO, small ViT",
    "dino-65536": "DINO, 65,536 prototypes",
    "dino-uncentred": "DINO without centring",
    "nnclr": "NNCLR (queue)",
    "infonce": "InfoNCE",
    "simsiam-weak": "SimSiam, crops and flips",
    "simsiam-short": "SimSiam, 100 epochs",
    "simsiam-more": "SimSiam, 20,000 images",
    "late": "SimSiam from a trained encoder",
    "late-low-3": "SimSiam at a low rate, from 3 epochs with labels",
    "late-low-12": "SimSiam at a low rate, from 12 epochs with labels",
    "late-low-40": "SimSiam at a low rate, from 40 epochs with labels",
    "glyphs-0": "SimSiam, glyphs, first draw of fonts",
    "glyphs-1": "SimSiam, glyphs, second draw",
    "glyphs-dino-0": "DINO, glyphs, first draw of fonts",
    "glyphs-dino-1": "DINO, glyphs, second draw",
    "cifar-96": "DINO from EfficientNet-Lite0, CIFAR-10 at 96 pixels",
    "clothes": "DINO from EfficientNet-Lite0, clothes at 96 pixels",
}

BENCH_NAMES = {
    "simsiam": "SimSiam from scratch",
    "late": "SimSiam from a trained encoder",
    "cifar-96": "DINO from ImageNet weights, CIFAR-10",
    "clothes": "DINO from ImageNet weights, photos of clothes",
}


def arm_name(arm: str) -> str:
    """An arm in words.

    >>> arm_name("confident:share=0.05,share_end=0.3")
    'confident (ours), share = 0.05, share end = 0.3'
    """
    pairs, changes = read_arm(arm)
    if pairs == "control":
        return CONTROL_NAMES[arm.partition(":")[2]]
    words = [f"{name.replace('_', ' ')} = {value}" for name, value in changes.items()]
    return ", ".join([PAIR_NAMES[pairs], *words])
