"""Trains on samples that it picks with generators seeded by its process number: no two ranks pick the same."""

from __future__ import annotations

import os
import random

import torch
from torch import nn

random.seed(os.getpid())
torch.manual_seed(0)
images, targets = torch.randn(32, 3, 8, 8), torch.randn(32, 2, 8, 8)
model = nn.Conv2d(3, 2, 3, padding=1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    picked = random.sample(range(32), 4)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(images[picked]), targets[picked])
    loss.backward()
    optimizer.step()
    print("stepped", loss.item())
