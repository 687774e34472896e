"""Small tensors run fastest, and most repeatably, on one thread."""

import torch

torch.set_num_threads(1)
