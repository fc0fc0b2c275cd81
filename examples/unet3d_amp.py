"""Finds balls in noisy volumes by a 3-D U-Net, in bfloat16, with gradients accumulated over two batches.

python examples/unet3d_amp.py
python -m distconv run --partition depth=2 examples/unet3d_amp.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor, nn


def volumes(count: int, size: int) -> tuple[Tensor, Tensor]:
    """Noisy volumes with a ball in each, and where that is: (count, 1, size, size, size) both."""
    axis = torch.arange(size, dtype=torch.float32)
    grid = torch.stack(torch.meshgrid(axis, axis, axis, indexing="ij"))
    centres = size * (0.3 + 0.4 * torch.rand(count, 3, 1, 1, 1))
    radii = size * (0.15 + 0.1 * torch.rand(count, 1, 1, 1))
    balls = ((grid - centres).square().sum(1) < radii.square()).float()[:, None]
    return balls + torch.randn_like(balls), balls


def convolutions(channels: int, filters: int) -> nn.Module:
    """Two convolutions, each with a norm."""
    return nn.Sequential(
        nn.Conv3d(channels, filters, 3, padding=1),
        nn.InstanceNorm3d(filters, affine=True),
        nn.ReLU(),
        nn.Conv3d(filters, filters, 3, padding=1),
        nn.InstanceNorm3d(filters, affine=True),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """A U-Net of two levels for volumes (N, 1, D, H, W) of even extents."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.bottom = convolutions(1, width), convolutions(width, 2 * width)
        self.rise = nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.up, self.head = convolutions(2 * width, width), nn.Conv3d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        deep = self.rise(self.bottom(nn.functional.max_pool3d(skip, 2)))
        return self.head(self.up(torch.cat([skip, deep], 1)))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--size", type=int, default=40)
    parser.add_argument("--width", type=int, default=8)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = UNet(options.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(device)
    losses = []
    for step in range(options.steps):
        for _ in range(2):
            x, target = (part.to(device) for part in volumes(1, options.size))
            with torch.autocast(device, torch.bfloat16):
                loss = nn.functional.binary_cross_entropy_with_logits(model(x), target) / 2
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(2 * loss.item())
        if step % 5 == 4:
            print(f"step {step + 1:3}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
