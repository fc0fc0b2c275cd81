"""A detector that takes a list of images (3, H, W), of any sizes, and batches them itself."""

import torch
from torch import nn


class Detector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
        self.scores = nn.Conv2d(8, 1, 1)
        self.boxes = nn.Conv2d(8, 4, 1)

    def forward(self, images, targets=None):
        height, width = max(i.shape[1] for i in images), max(i.shape[2] for i in images)
        batch = torch.stack([nn.functional.pad(i, (0, width - i.shape[2], 0, height - i.shape[1])) for i in images])
        features = self.features(batch).relu()
        scores, boxes = self.scores(features).flatten(1), self.boxes(features).flatten(2).mean(2)
        if targets is None:
            return [{"scores": s.sigmoid(), "boxes": b} for s, b in zip(scores, boxes, strict=True)]
        wanted = torch.stack([target["boxes"][0] for target in targets])
        return {
            "scores": nn.functional.binary_cross_entropy_with_logits(scores, torch.zeros_like(scores)),
            "boxes": nn.functional.smooth_l1_loss(boxes, wanted),
        }


torch.manual_seed(0)
images = [torch.randn(3, 12, 16), torch.randn(3, 16, 12), torch.randn(3, 16, 16), torch.randn(3, 8, 16)]
targets = [{"boxes": torch.rand(2, 4), "labels": torch.ones(2, dtype=torch.long)} for _ in images]
model = Detector()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    losses = model(images, targets)
    loss = sum(losses.values())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.8f}")
model.eval()
with torch.no_grad():
    found = model(images)
print(f"found {len(found)} {sum(f['scores'].sum().item() for f in found):.6f}")
