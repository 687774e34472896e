"""Views of images: what is random about one, crops, and the colours of whole batches of crops."""
