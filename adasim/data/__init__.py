"""The path of a pixel: where images come from, views of them, batches of views.

    images.py        what a data set of images looks like to the rest (`ImageSet`); images in memory, .npz files
    image_folder.py  a folder of image files: a million names in a few buffers, and which classes they have
    datasets.py      data sets of Hugging Face, torchvision and torch
    synthetic.py     images that are drawn by code; masks.py: images with segmentation masks
    sources.py       `open_images`, `as_images`; what a data set holds, in words; images by verdict
    identity.py      is it still the same data? What a run writes down, and compares when it goes on
    crops.py         what is random about a view, and its crop; images that cannot be read are replaced
    augment.py       colours, in whole batches
    loader.py        `PairLoader`: the views of whole epochs
    pool.py          loader processes, for training and evaluation

From files to 8-bit RGB: adasim/util/rgb.py. Nothing here knows of neighbours or methods.
"""

from adasim.data.augment import BatchedViews
from adasim.data.datasets import HuggingFaceImages
from adasim.data.identity import check_same_data, record
from adasim.data.image_folder import FolderImages
from adasim.data.images import ArrayImages, ImageSet, Subset
from adasim.data.loader import Batch, PairLoader
from adasim.data.pool import worker_count
from adasim.data.sources import (
    ImagesLike,
    as_images,
    describe,
    leave_out,
    open_images,
    relabel,
    with_verdicts,
)
from adasim.data.synthetic import SyntheticImages, synthetic
from adasim.util.rgb import Unreadable

__all__ = [
    "ArrayImages",
    "Batch",
    "BatchedViews",
    "FolderImages",
    "HuggingFaceImages",
    "ImageSet",
    "ImagesLike",
    "PairLoader",
    "Subset",
    "SyntheticImages",
    "Unreadable",
    "as_images",
    "check_same_data",
    "describe",
    "leave_out",
    "open_images",
    "record",
    "relabel",
    "synthetic",
    "with_verdicts",
    "worker_count",
]
