"""The path of a pixel: where images come from, views of them, batches of views.

    images.py     what a data set of images looks like to the rest (`ImageSet`)
    sources/      folders, .npz files, Hugging Face, what Python hands over; masks; a run's record of its data
    synthetic.py  images that are drawn by code
    views.py      random parameters of a view, and its crop
    augment.py    colours, in whole batches
    loader.py     `PairLoader`: whole epochs of view pairs; images that cannot be read are replaced
    pool.py       loader processes, for training and evaluation; crop_worker.py: what they do for training

Nothing here knows of neighbours or methods.
"""

from adasim.data.augment import BatchedViews
from adasim.data.images import ArrayImages, ImageSet, Subset, Unreadable
from adasim.data.loader import Batch, PairLoader
from adasim.data.pool import worker_count
from adasim.data.sources.excluded import leave_out
from adasim.data.sources.folder import FolderImages
from adasim.data.sources.found import describe
from adasim.data.sources.handed import ImagesLike, as_images
from adasim.data.sources.hub import HuggingFaceImages
from adasim.data.sources.opening import open_images
from adasim.data.sources.record import check_same_data, record
from adasim.data.synthetic import SyntheticImages, synthetic

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
    "synthetic",
    "worker_count",
]
