"""What it costs to draw the numbers of one process instead of those of each shard: a plain script to be run by

python -m distconv run --partition sample=2,height=2 benchmarks/distributed/random_numbers.py

It trains three networks with dropout behind every activation, a ResNet-18, a 3-D U-Net and a transformer of patches,
with `--random apart` and `same` in turn, and prints the processor time of a step of the first rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.table import Table, show
from mucudnn.networks.models import ResNet, UNet3d

SHARE = 0.1


class Patches(nn.Module):
    """A transformer of 12x12 patches of 16x16 pixels: 6 layers of 192 features in 3 heads."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 16, stride=16)
        layer = nn.TransformerEncoderLayer(192, 3, 768, SHARE, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.head = nn.Linear(192, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


def dropping(model: nn.Module) -> nn.Module:
    """The model with dropout behind every ReLU."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU):
                setattr(module, name, nn.Sequential(nn.ReLU(), nn.Dropout(SHARE)))
    return model


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "ResNet-18, 8 x 128²": (lambda: dropping(ResNet(18, classes=10)), (8, 3, 128, 128)),
    "3-D U-Net, 2 x 32³": (lambda: dropping(UNet3d(width=16, levels=3)), (2, 1, 32, 32, 32)),
    "transformer, 8 x 192²": (Patches, (8, 3, 192, 192)),
}


def seconds(model: nn.Module, shape: tuple[int, ...], steps: int) -> dict[str, list[float]]:
    """Processor seconds of each step, by how it drew; after two steps of each that do not count."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    spent: dict[str, list[float]] = {"apart": [], "same": []}
    for step in range(steps + 2):
        for how in ("apart", "same") if step % 2 else ("same", "apart"):
            os.environ["DISTCONV_RANDOM"] = how
            x = torch.randn(shape)
            begin = time.process_time()
            optimizer.zero_grad()
            y = model(x)
            loss = F.cross_entropy(y, torch.zeros(y.shape[0], *y.shape[2:], dtype=torch.long))
            loss.backward()
            optimizer.step()
            loss.item()
            if step >= 2:
                spent[how].append(time.process_time() - begin)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="pairs of steps of each network (%(default)s)")
    options = parser.parse_args()
    rows = []
    for name, (build, shape) in NETWORKS.items():
        torch.manual_seed(0)
        spent = seconds(build(), shape, options.steps)
        apart, same = (statistics.median(spent[how]) for how in ("apart", "same"))
        more = statistics.median(b / a - 1 for a, b in zip(spent["apart"], spent["same"], strict=True))
        rows.append((name, f"{1e3 * apart:.1f}", f"{1e3 * same:.1f}", f"{100 * more:.1f}"))
    columns = ("network", "apart, ms", "same, ms", "more, %, median of pairs")
    show([Table("Processor time of a step with dropout", columns, rows)])


if __name__ == "__main__":
    main()
