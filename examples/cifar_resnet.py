"""Trains a small ResNet on made-up 32x32 colour images of ten classes, as a script for CIFAR-10 would.

python examples/cifar_resnet.py
python -m distconv run --partition sample=2 examples/cifar_resnet.py
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


def images(count: int) -> TensorDataset:
    """Stripes in noise: the class is their direction. Images (count, 3, 32, 32) and classes (count,)."""
    classes = torch.randint(0, 10, (count,))
    angles = classes * math.pi / 10
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    along = angles.cos()[:, None, None] * columns + angles.sin()[:, None, None] * rows
    stripes = torch.sin(along + 2 * math.pi * torch.rand(count, 1, 1))
    return TensorDataset(stripes[:, None] * torch.rand(count, 3, 1, 1) + 0.5 * torch.randn(count, 3, 32, 32), classes)


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, filters, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(filters),
            nn.ReLU(),
            nn.Conv2d(filters, filters, 3, padding=1, bias=False),
            nn.BatchNorm2d(filters),
        )
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(channels, filters, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(width: int) -> nn.Module:
    """A ResNet of eight layers for images (N, 3, 32, 32)."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--width", type=int, default=12)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    loader = DataLoader(images(options.steps * options.batch), options.batch, shuffle=True)
    model = resnet(options.width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=options.steps + 1)
    losses = []
    for x, classes in loader:
        scores = model(x)
        loss = nn.functional.cross_entropy(scores, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if len(losses) % 10 == 0:
            right = (scores.argmax(1) == classes).float().mean().item()
            print(f"step {len(losses):3}  loss {losses[-1]:.4f}  {right:.0%} right", flush=True)
    return losses


if __name__ == "__main__":
    main()
