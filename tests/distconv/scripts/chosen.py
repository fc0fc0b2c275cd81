"""A script that trains a small network, and notes in a file of its folder that it was started."""

import torch
from torch import nn

torch.manual_seed(0)
norm = nn.LayerNorm((8, 32, 32))  # has most parameters
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with open("starts.txt", "a") as notes:
    notes.write("started\n")
for _ in range(2):
    loss = nn.functional.cross_entropy(model(torch.randn(2, 3, 32, 32)), torch.randint(5, (2,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{loss.item():.6f}")
