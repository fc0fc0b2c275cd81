"""Automatic mixed precision in bfloat16 on the host."""

import torch
from torch import nn

torch.manual_seed(0)
x, labels = torch.randn(8, 3, 12, 12), torch.randint(5, (8,))
model = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 16, 3, padding=1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 5),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = nn.functional.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    print(f"loss {loss.item():.8f}")
