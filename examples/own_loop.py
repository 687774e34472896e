"""NeighborMemory in a training loop of your own: SimSiam in plain torch, no other part of the training package.

    python examples/own_loop.py

Four lines are AdaSim's: the memory, the loader whose sampler draws the partners of each epoch, observing the
features, and the epoch's end.
"""

import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from torch.utils.data import DataLoader

from adasim import NeighborMemory, PairDataset, PairSampler
from adasim.data import synthetic

images = synthetic(2000).as_array().float() / 255 - 0.5  # (N, 1, 32, 32)

encoder = nn.Sequential(
    *(nn.Conv2d(1, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
    *(nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU()),
    *(nn.Conv2d(64, 128, 3, 2, 1), nn.BatchNorm2d(128), nn.ReLU()),
    *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
)
projector = nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, 256))
predictor = nn.Sequential(nn.Linear(256, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 256))
optimizer = torch.optim.SGD(
    [*encoder.parameters(), *projector.parameters(), *predictor.parameters()], lr=0.05, momentum=0.9
)


def view(image: torch.Tensor) -> torch.Tensor:
    """A flip, a shift and some noise; use your own augmentations here."""
    image = image.flip(2) if torch.rand(()) < 0.5 else image
    return image.roll(tuple(torch.randint(-4, 5, (2,)).tolist()), (1, 2)) + 0.05 * torch.randn_like(image)


torch.manual_seed(0)
memory = NeighborMemory(num_images=len(images), dim=128, window=2, k=5)
loader = DataLoader(
    PairDataset(images, view),  # (image id, view 1 of the image, view 2 of its partner)
    batch_size=100,
    sampler=PairSampler(memory, tau=0.2, seed=0),  # the partner is the image itself until the window is full
)
for epoch in range(6):
    losses = []
    for ids, view_1, view_2 in loader:
        h1, h2 = encoder(view_1), encoder(view_2)
        z1, z2 = projector(h1), projector(h2)
        p1, p2 = predictor(z1), predictor(z2)
        loss = -(cosine_similarity(p1, z2.detach()) + cosine_similarity(p2, z1.detach())).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.observe(ids, h1)  # searches the cache, then writes; h1 is view 1, the image itself
        losses.append(loss.item())
    changed = (memory.draw_partners(epoch, tau=0.2, seed=0) != torch.arange(len(images))).float().mean()
    memory.end_epoch()
    print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}, bootstrapping ratio {changed:.0%}")
