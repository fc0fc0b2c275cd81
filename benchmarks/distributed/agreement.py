"""What it costs that ranks compare checksums of their inputs, targets and parameters: a plain script to be run by

python -m distconv run --partition sample=1,depth=2,height=2 benchmarks/distributed/agreement.py

It trains the U-Net of `benchmarks/demo/brain_volume.py` on a volume of its size, with the check on and off in turn, and
prints the host time of a step of the first rank: processor time of all its threads, and elapsed time. On a machine that
does other things these differ more from step to step than the check takes; so the processor time of the main thread
within the check's own functions is told, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.table import Table, show
from distconv.agreement.ledger import Ledger
from mucudnn.networks.models import UNet3d


def counted(spent: list[float]) -> None:
    """From now on the processor time within the check is added to the last of the list."""
    depth = 0

    def count(function: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **kwargs: Any) -> Any:
            nonlocal depth
            depth, begin = depth + 1, time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                depth -= 1
                spent[-1] += 0 if depth else time.thread_time() - begin

        return counting

    for name in ("note", "note_once", "called", "compare", "settle"):
        setattr(Ledger, name, count(getattr(Ledger, name)))


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
    within = [0.0]
    counted(within)
    for step in range(options.steps + 2):
        for check in ("off", "on") if step % 2 else ("on", "off"):
            os.environ["DISTCONV_CHECK"] = check
            inputs = torch.randn(1, 1, *size)
            processor, elapsed = time.process_time(), time.perf_counter()
            within.append(0.0)
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
    own = statistics.median(seconds for seconds in within if seconds)
    part = 100 * own / statistics.median(processor for processor, _ in spent["off"])
    rows.append(("within the check, main thread", f"{1e3 * own:.2f}", ""))
    rows.append(("within the check, %", f"{part:.2f}", ""))
    show([Table("A step with and without the check", ("check", "processor ms", "elapsed ms"), rows)])


if __name__ == "__main__":
    main()
