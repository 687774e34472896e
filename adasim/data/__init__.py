"""Images, views of them, and the loader of view pairs. Nothing here knows of neighbours or methods."""

from adasim.data.batched import BatchedViews
from adasim.data.embedded import EmbeddedImages, embedded
from adasim.data.folder import FolderImages
from adasim.data.found import describe
from adasim.data.images import ArrayImages, ImageSet, Unreadable
from adasim.data.loader import Batch, PairLoader
from adasim.data.record import check_same_data, record
from adasim.data.sources import open_images
from adasim.data.views import Views

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
