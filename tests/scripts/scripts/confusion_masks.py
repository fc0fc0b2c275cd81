"""Segmentation scores by a confusion matrix over 147,456 pixels, of which a mask takes those with a label."""

import torch
from networks import UNet
from torch import nn

CLASSES = 3


class ConfusionMatrix:
    def __init__(self):
        self.mat = None

    def update(self, a, b):
        if self.mat is None:
            self.mat = torch.zeros((CLASSES, CLASSES), dtype=torch.int64, device=a.device)
        with torch.inference_mode():
            k = (a >= 0) & (a < CLASSES)
            inds = CLASSES * a[k].to(torch.int64) + b[k]
            self.mat += torch.bincount(inds, minlength=CLASSES**2).reshape(CLASSES, CLASSES)

    def compute(self):
        h = self.mat.float()
        return (
            torch.diag(h).sum() / h.sum(),
            torch.diag(h) / h.sum(1),
            torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h)),
        )

    def __str__(self):
        correct, by_row, union = self.compute()
        rows = [f"{i:.3f}" for i in (by_row * 100).tolist()]
        ious = [f"{i:.3f}" for i in (union * 100).tolist()]
        return f"correct {correct.item() * 100:.3f} rows {rows} IoU {ious} mean {union.mean().item() * 100:.3f}"


torch.manual_seed(3)
model = UNet(outputs=CLASSES)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
x, target = torch.rand(4, 3, 192, 192), torch.randint(CLASSES, (4, 192, 192))
target[:, :4] = 255
for _ in range(2):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), target, ignore_index=255)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.5f}")
matrix = ConfusionMatrix()
model.eval()
with torch.inference_mode():
    matrix.update(target.flatten(), model(x).argmax(1).flatten())
print(matrix)
valid = target != 255
with torch.no_grad():
    output = model(x)
    print(f"scores {output.permute(0, 2, 3, 1)[valid].mean(0).tolist()}")
    print("positive", (output > 0).nonzero().shape[0], "certain", output[output > 1].numel())
