"""Host time of a training step of ResNet-50 with tiny activations, in one process of a fake group of four ranks.

python benchmarks/host.py

Messages are free here: what is measured is the processor time of this process alone, medians of steps in turn. Beside
it stand the collectives of a step, and the bytes that a rank hands to them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import distconv
from benchmarks.table import Table, conditions, save, show
from mucudnn.networks.models import NETWORKS

RESULT = "host-cpu"
RANKS, WARM = 4, 3
PARTITIONS = ("sample=4", "height=4", "sample=2,height=2", "height=2,width=2", "sample=2,channel=2")


class _Done:
    """The work of a message that needs no time: a fake group refuses an empty input where something is received."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


class Messages:
    """Counts the collectives that a process asks for, and the bytes that it hands to them."""

    NAMES = ("all_reduce", "all_to_all_single", "all_gather_into_tensor", "all_gather_single", "broadcast")

    def __init__(self) -> None:
        self.calls = self.bytes = 0
        for name in self.NAMES:
            if hasattr(dist, name):
                at = 1 if name.endswith(("single", "tensor")) else 0
                setattr(dist, name, self._counted(getattr(dist, name), at))

    def _counted(self, collective: Callable[..., Any], at: int) -> Callable[..., Any]:
        exchanges = collective.__name__ == "all_to_all_single"

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls, self.bytes = self.calls + 1, self.bytes + args[at].numel() * args[at].element_size()
            if exchanges and not args[1].numel():
                return _Done()
            work = collective(*args, **kwargs)
            return _Done() if exchanges else work

        return counted


def step(model: nn.Module, x: Tensor, target: Tensor) -> None:
    """Forward and backward; the gradients of the step before are dropped first."""
    model.zero_grad(set_to_none=True)
    functional.cross_entropy(model(x), target).backward()


def measured(width: int, size: int, rounds: int) -> dict[str, dict[str, float]]:
    """By way to run the step: milliseconds, how often plain torch's, collectives and bytes."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return NETWORKS["resnet50"].build(width=width)

    x, target = torch.randn(RANKS, 3, size, size), torch.arange(RANKS)
    messages = Messages()
    arms = {"plain": model()}
    for partition in PARTITIONS:
        arms[partition] = distconv.parallelize(model(), distconv.init(partition, device_type="cpu"))
    times: dict[str, list[float]] = {name: [] for name in arms}
    found: dict[str, dict[str, float]] = {}
    for _ in range(WARM + rounds):
        for name, arm in arms.items():
            messages.calls = messages.bytes = 0
            start = time.process_time()
            step(arm, x, target)
            times[name].append(1e3 * (time.process_time() - start))
            found[name] = {"collectives": messages.calls, "bytes": messages.bytes}
    medians = {name: statistics.median(values[WARM:]) for name, values in times.items()}
    return {name: {"ms": medians[name], "over plain": medians[name] / medians["plain"], **found[name]} for name in arms}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4, help="channels of the first stage (default %(default)s)")
    parser.add_argument("--size", type=int, default=64, help="height and width of the input (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="steps that count (default %(default)s)")
    parser.add_argument("--save", action="store_true", help=f"keep the figures as benchmarks/results/{RESULT}")
    arguments = parser.parse_args()
    about = f"{__doc__.split(chr(10) * 2)[2]}\n\n{conditions()}"
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    figures = measured(arguments.width, arguments.size, arguments.rounds)
    rows = [
        (name, f"{f['ms']:.1f}", f"{f['over plain']:.2f}", f"{f['collectives']:.0f}", f"{f['bytes'] / 2**10:.0f}")
        for name, f in figures.items()
    ]
    headings = ("", "ms of the host", "over plain", "collectives", "KiB")
    tables = [
        Table(
            f"A training step of ResNet-50, width {arguments.width}, on 4 images of {arguments.size}²", headings, rows
        )
    ]
    if arguments.save:
        save(RESULT, "Host time of a training step", about, figures, tables)
    show(tables)


if __name__ == "__main__":
    main()
