"""What it costs that ranks compare checksums of their inputs, targets and parameters: a plain script to be run by

python -m distconv run --partition sample=1,depth=2,height=2 benchmarks/agreement.py

It trains the U-Net of brain_volume.py on a volume of its size, with the check on and off in turn, and prints the host
time of a step of the first rank: processor time of all its threads, and elapsed time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from table import Table, show

from mucudnn.networks.models import UNet3d


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40, help="pairs of steps, after two warm-up pairs (%(default)s)")
    parser.add_argument("--size", default="64x80x64", help="voxels along depth, height, width (%(default)s)")
    options = parser.parse_args()
    size = tuple(int(part) for part in options.size.split("x"))
    torch.manual_seed(0)
    model = UNet3d(width=8, levels=3, norm="group")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    targets = torch.rand(1, 3, *size).softmax(1)
    spent: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
    for step in range(options.steps + 2):
        for check in ("off", "on") if step % 2 else ("on", "off"):
            os.environ["DISTCONV_CHECK"] = check
            inputs = torch.randn(1, 1, *size)
            processor, elapsed = time.process_time(), time.perf_counter()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            loss.item()
            if step >= 2:
                spent[check].append((time.process_time() - processor, time.perf_counter() - elapsed))
    rows: list[tuple[str, ...]] = []
    for check, steps in spent.items():
        rows.append((check, *(f"{1e3 * statistics.median(kind):.2f}" for kind in zip(*steps, strict=True))))
    pairs = list(zip(spent["on"], spent["off"], strict=True))
    more = [statistics.median(on[kind] - off[kind] for on, off in pairs) for kind in (0, 1)]
    share = [100 * extra / statistics.median(each[kind] for each in spent["off"]) for kind, extra in enumerate(more)]
    rows.append(("more, median of pairs", *(f"{1e3 * extra:.2f}" for extra in more)))
    rows.append(("more, %", *(f"{part:.2f}" for part in share)))
    show([Table("A step with and without the check", ("check", "processor ms", "elapsed ms"), rows)])


if __name__ == "__main__":
    main()
