"""Gradients of several batches added up before a step, in plain torch."""

import torch
from torch import nn

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x, labels = torch.randn(16, 3, 12, 12), torch.randint(5, (16,))
model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 5))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
for _ in range(3):
    for images, targets in zip(x.split(4), labels.split(4), strict=True):
        loss = nn.functional.cross_entropy(model(images), targets) / 4
        loss.backward()
        print(f"loss {loss.item():.10f}")
    print(f"gradient {sum(p.grad.square().sum().item() for p in model.parameters()):.10f}")
    optimizer.step()
    optimizer.zero_grad()
