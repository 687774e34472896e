"""Images, views of them, and the loader of view pairs. Nothing here knows of neighbours or methods."""

from adasim.data.images import ArrayImages, ImageSet, Unreadable
from adasim.data.loading.loader import Batch, PairLoader
from adasim.data.sources.folder import FolderImages
from adasim.data.sources.found import describe
from adasim.data.sources.opening import open_images
from adasim.data.sources.record import check_same_data, record
from adasim.data.synthetic.dataset import EmbeddedImages, embedded
from adasim.data.views.batched import BatchedViews
from adasim.data.views.per_image import Views

__all__ = [
    "ArrayImages",
    "Batch",
    "BatchedViews",
    "EmbeddedImages",
    "FolderImages",
    "ImageSet",
    "PairLoader",
    "Unreadable",
    "Views",
    "check_same_data",
    "describe",
    "embedded",
    "open_images",
    "record",
]
