"""AdaSim pairs in a SimSiam loop of the lightly library: its transform, heads and loss, and our neighbour memory.

    pip install lightly
    python examples/lightly_simsiam.py

The loop is lightly's own SimSiam tutorial but for four lines: the memory, the sampler that draws the partners of each
epoch, observing the features, and the epoch's end. View 1 is of the image, view 2 of its partner.
"""

import torch
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import SimSiamPredictionHead, SimSiamProjectionHead
from lightly.transforms.simsiam_transform import SimSiamViewTransform
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms.functional import to_pil_image

from adasim import NeighborMemory, PairDataset, PairSampler
from adasim.data import synthetic

EPOCHS = 4
# Any map-style data set of PIL images, such as torchvision's CIFAR10: 500 drawn ones here.
images = [to_pil_image(image).convert("RGB") for image in synthetic(500).as_array()]


class SimSiam(nn.Module):
    """Returns the encoder's feature too, which is what the memory keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(  # any encoder: a ResNet without its last layer, say
            *(nn.Conv2d(3, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, 2, 1), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.Conv2d(64, 128, 3, 2, 1), nn.BatchNorm2d(128), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.projection_head = SimSiamProjectionHead(128, 256, 256)
        self.prediction_head = SimSiamPredictionHead(256, 64, 256)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        feature = self.backbone(x)
        z = self.projection_head(feature)
        return feature, z.detach(), self.prediction_head(z)


torch.manual_seed(0)
model = SimSiam()
criterion = NegativeCosineSimilarity()
optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
# Mild views: an image whose own view is not its nearest has no partner but itself, and this encoder is a beginner.
transform = SimSiamViewTransform(
    input_size=32, min_scale=0.8, cj_prob=0.0, random_gray_scale=0.0, gaussian_blur=0.0
)

memory = NeighborMemory(num_images=len(images), dim=128, window=2, k=5)
loader = DataLoader(
    PairDataset(images, transform),  # (image id, view 1 of the image, view 2 of its partner)
    batch_size=50,
    sampler=PairSampler(memory, tau=0.2, seed=0),  # the partner is the image itself until the window is full
)
for epoch in range(EPOCHS):
    total = 0.0
    for ids, view_1, view_2 in loader:
        feature, z1, p1 = model(view_1)
        _, z2, p2 = model(view_2)
        loss = 0.5 * (criterion(z1, p2) + criterion(z2, p1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        memory.observe(ids, feature)  # searches the cache, then writes
        total += loss.item() / len(loader)
    changed = (memory.draw_partners(epoch, tau=0.2, seed=0) != torch.arange(len(images))).float().mean()
    memory.end_epoch()
    print(f"epoch {epoch + 1}: loss {total:.3f}, bootstrapping ratio {changed:.0%}")
