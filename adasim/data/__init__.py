"""The path of a pixel: where images come from, views of them, batches of views.

    images.py     what a data set of images looks like to the rest (`ImageSet`)
    sources.py    `open_images`, by name; what a data set holds, in words; images rejected by verdict
    image_folder.py, npz.py, hub.py, python.py, synthetic.py, masks.py   one kind of source each
    listing.py    which files a folder holds: a million names in a few buffers
    decode.py     from a file to 8-bit RGB
    identity.py   is it still the same data? What a run writes down, and compares when it goes on
    crops.py      what is random about a view, and its crop; images that cannot be read are replaced
    augment.py    colours, in whole batches
    loader.py     `PairLoader`: the views of whole epochs
    pool.py       loader processes, for training and evaluation

Nothing here knows of neighbours or methods.
"""

from adasim.data.augment import BatchedViews
from adasim.data.hub import HuggingFaceImages
from adasim.data.identity import check_same_data, record
from adasim.data.image_folder import FolderImages
from adasim.data.images import ArrayImages, ImageSet, Subset, Unreadable
from adasim.data.loader import Batch, PairLoader
from adasim.data.pool import worker_count
from adasim.data.python import ImagesLike, as_images
from adasim.data.sources import describe, leave_out, open_images
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
