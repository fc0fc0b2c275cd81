"""Trains a 3-D U-Net to segment volumes of fractals until a Dice of 0.95 in validation; a script for one device.

    python benchmarks/fractal/unet.py write fractals.zarr --size 32 --volumes 40
    python benchmarks/fractal/unet.py train fractals.zarr

Network, loss and optimizer are in the manner of ScaFFold (github.com/LBANN/ScaFFold): a U-Net with group norms and
transposed convolutions; cross entropy, in which categories weigh as much as what is empty, and Dice of probabilities;
Adam. The score is the Dice of the predicted categories over three volumes in ten, which are not trained on, averaged
over categories. Reading is part of all seconds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import zarr
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.fractal import volumes


def double(inputs: int, outputs: int, groups: int) -> nn.Sequential:
    """Two convolutions, each with a group norm."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv3d(channels, outputs, 3, padding=1, bias=False), nn.GroupNorm(groups, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Takes (N, 3, D, H, W), gives scores (N, classes, D, H, W); D, H and W are multiples of 2 ** poolings.

    Args:
        classes: categories, and one for what belongs to none.
        width: channels at full resolution; each pooling doubles them.
        poolings: resolutions below the full one.
        groups: of the norms; they divide width.
    """

    def __init__(self, classes: int = 6, width: int = 64, poolings: int = 4, groups: int = 8) -> None:
        super().__init__()
        channels = [width * 2**level for level in range(poolings + 1)]
        self.pool = nn.MaxPool3d(2)
        self.down = nn.ModuleList(
            double(inputs, outputs, groups)
            for inputs, outputs in zip([volumes.COLOURS, *channels], channels, strict=False)
        )
        rising = list(reversed(channels))
        pairs = list(itertools.pairwise(rising))
        self.rise = nn.ModuleList(nn.ConvTranspose3d(inputs, outputs, 2, stride=2) for inputs, outputs in pairs)
        self.up = nn.ModuleList(double(inputs, outputs, groups) for inputs, outputs in pairs)
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for level, block in enumerate(self.down):
            x = block(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x = block(torch.cat([skips.pop(), rise(x)], 1))
        return self.head(x)


class Fractals(Dataset[tuple[Tensor, Tensor]]):
    """Volumes (3, D, H, W) in float32 and masks (D, H, W) of class numbers, from a folder of Zarr."""

    def __init__(self, path: Path) -> None:
        group = zarr.open_group(str(path), mode="r")
        self.volumes: Any = group["volume"]
        self.masks: Any = group["mask"]

    def __len__(self) -> int:
        return int(self.volumes.shape[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.volumes[index]), torch.from_numpy(self.masks[index].astype("int64"))


def overlap(members: Tensor, mask: Tensor) -> Tensor:
    """|A and B| and |A| + |B| of each category (2, categories), summed over volumes.

    Args:
        members: (N, classes, D, H, W), how much a voxel belongs to each class, from 0 to 1.
        mask: (N, D, H, W), the true classes; 0, no category, does not count.
    """
    classes = torch.arange(1, members.shape[1], device=mask.device).view(1, -1, 1, 1, 1)
    true, found = (mask[:, None] == classes).to(members.dtype), members[:, 1:]
    return torch.stack([(found * true).sum((0, 2, 3, 4)), (found + true).sum((0, 2, 3, 4))])


def dice(overlap: Tensor) -> Tensor:
    """2 |A and B| / (|A| + |B|), averaged over categories; 1 for one that nobody has seen."""
    both, sizes = overlap
    return ((2 * both + 1e-6) / (sizes + 1e-6)).mean()


def class_weights(masks: Any, classes: int) -> Tensor:
    """Weights (classes,) by which categories together count as much as the voxels that belong to none."""
    empty = float((masks == 0).mean())
    return torch.tensor([1 / empty, *[1 / (1 - empty)] * (classes - 1)])


def loss_of(scores: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    return F.cross_entropy(scores, mask, weights) + 1 - dice(overlap(scores.softmax(1), mask))


def predicted(scores: Tensor) -> Tensor:
    """1 for the class with the highest score in each voxel, 0 for the others, shaped as the scores."""
    classes = torch.arange(scores.shape[1], device=scores.device).view(1, -1, 1, 1, 1)
    return (scores.argmax(1, keepdim=True) == classes).to(scores.dtype)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Trains; the result has losses of all steps, scores of all epochs and the seconds to the end of each epoch."""
    torch.manual_seed(options.seed)
    dtype = getattr(torch, options.dtype)
    fractals = Fractals(options.data)
    trained = len(fractals) * 7 // 10
    loader = DataLoader(Subset(fractals, range(trained)), options.batch, shuffle=True)
    validation = DataLoader(Subset(fractals, range(trained, len(fractals))), options.batch)
    model = UNet(options.classes, options.width, options.poolings, options.groups).to(options.device, dtype)
    weights = class_weights(fractals.masks[: -(-trained // 10)], options.classes).to(options.device, dtype)
    optimizer = torch.optim.Adam(model.parameters(), lr=options.rate)
    record: dict[str, Any] = {"losses": [], "dice": [], "seconds": []}
    begin = time.perf_counter()
    for epoch in range(options.epochs):
        model.train()
        for volume, mask in loader:
            optimizer.zero_grad()
            loss = loss_of(model(volume.to(options.device, dtype)), mask.to(options.device), weights)
            loss.backward()
            optimizer.step()
            record["losses"].append(loss.item())
        model.eval()
        with torch.no_grad():
            seen = [
                overlap(predicted(model(volume.to(options.device, dtype))), mask.to(options.device))
                for volume, mask in validation
            ]
        record["dice"].append(dice(torch.stack(seen).sum(0)).item())
        record["seconds"].append(time.perf_counter() - begin)
        print(
            f"epoch {epoch + 1:3}  loss {record['losses'][-1]:.6f}  Dice {record['dice'][-1]:.4f}"
            f"  {record['seconds'][-1]:.1f} s",
            flush=True,
        )
        if record["dice"][-1] >= options.until:
            break
    return record


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="make volumes")
    training = commands.add_parser("train", help="train on them")
    for one in (writing, training):
        one.add_argument("data", type=Path, help="folder of Zarr")
        one.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    writing.add_argument("--size", type=int, default=32, help="voxels along a side (default %(default)s)")
    writing.add_argument("--volumes", type=int, default=40, help="(default %(default)s)")
    writing.add_argument("--categories", type=int, default=3, help="kinds of fractals (default %(default)s)")
    writing.add_argument("--noise", type=float, default=0.1, help="standard deviation (default %(default)s)")
    training.add_argument("--classes", type=int, default=4, help="categories and one (default %(default)s)")
    training.add_argument("--epochs", type=int, default=70, help="at most (default %(default)s)")
    training.add_argument("--until", type=float, default=0.95, help="Dice that ends it (default %(default)s)")
    training.add_argument("--batch", type=int, default=2, help="volumes of a step (default %(default)s)")
    training.add_argument("--rate", type=float, default=2e-2, help="learning rate (default %(default)s)")
    training.add_argument("--width", type=int, default=8, help="of the U-Net (default %(default)s)")
    training.add_argument("--poolings", type=int, default=2, help="of the U-Net (default %(default)s)")
    training.add_argument("--groups", type=int, default=4, help="of its norms (default %(default)s)")
    training.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="(default %(default)s)")
    training.add_argument("--device", default="cpu", help="such as cpu or cuda (default %(default)s)")
    training.add_argument("--json", type=Path, help="write losses, scores and seconds there")
    return parser.parse_args(given)


def main() -> None:
    options = arguments()
    if options.command == "write":
        scenes = volumes.Scenes(options.size, options.categories, options.noise, options.seed)
        volumes.write(options.data, scenes, options.size, options.volumes)
        return
    record = train(options)
    score, steps = record["dice"][-1], len(record["losses"])
    reached = "reached" if score >= options.until else f"not reached, {score:.4f}"
    print(f"Dice {options.until:g} {reached}: {record['seconds'][-1]:.1f} s, {steps} steps")
    if options.json:
        options.json.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
