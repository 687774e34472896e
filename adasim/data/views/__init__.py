"""Views of images: random parameters, and two engines (per image, batched) that make one view from them."""
