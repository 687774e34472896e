"""Images, views of them, and the loader of view pairs. Nothing here knows of neighbours or methods."""

from adasim.data.batched import BatchedViews
from adasim.data.embedded import EmbeddedImages, embedded
from adasim.data.folder import FolderImages
from adasim.data.images import ArrayImages, ImageSet, Unreadable
from adasim.data.loader import Batch, PairLoader
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
    "embedded",
    "open_images",
]
