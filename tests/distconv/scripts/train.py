"""Trains a small network on made-up images and prints its losses: a plain script for one device."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--task", choices=["classes", "pixels"], default="classes")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save")
options = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x = torch.randn(11, 3, 12, 10)
pixels = options.task == "pixels"
y = torch.randn(11, 4, 12, 10) if pixels else torch.randint(0, 5, (11,))
loader = DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True)

layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)]
if not pixels:
    layers += [nn.Conv2d(4, 4, 3, stride=2), nn.Flatten(), nn.Linear(80, 5)]
model = nn.Sequential(*layers)
criterion = nn.MSELoss() if pixels else nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

for epoch in range(options.epochs):
    for images, targets in loader:
        optimizer.zero_grad()
        loss = criterion(model(images), targets)
        loss.backward()
        optimizer.step()
        print(f"epoch {epoch} batch of {images.shape[0]} loss {loss.item():.12f}", flush=True)
if options.save:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, options.save)
