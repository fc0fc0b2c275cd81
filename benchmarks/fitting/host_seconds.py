"""What the host takes for an operator of a part, beside the kernels: `HOST_SECONDS` of `distconv/fitting/choice.py`.

    python benchmarks/fitting/host_seconds.py --networks "NAFNet, step" "SD decoder" --save

Networks of `networks.py`, with smaller inputs, run whole and in four parts within half of their memory, on one thread;
the fastest of a few calls counts, in processor time. What parts take beyond the predicted time of their kernels,
transfers and exchanges, scaled by measured over predicted time of the whole call, is the host's.
"""

from __future__ import annotations

import copy
import gc
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from tqdm import tqdm

import distconv
from benchmarks.fitting.networks import NETWORKS, Network
from benchmarks.fitting.trial import numbers
from benchmarks.harness import Record, finish, parser
from benchmarks.table import Table
from distconv.fitting.following import followed
from distconv.fitting.prices import measured_prices
from distconv.settings.partition import Partition
from distconv.turns.one_part import predicted, record_part

RESULT = "host-seconds-cpu"
AXES = {3: "width", 4: "height", 5: "depth"}
PARTS = 4
SCALES = {
    "3-D U-Net, step": 0.5,
    "nnU-Net, step": 0.5,
    "VoxelMorph, step": 0.5,
    "NAFNet, step": 0.25,
    "SD decoder, step": 0.25,
    "ResNet-50, step": 0.1,
    "RRDBNet": 0.25,
    "DAC decoder": 0.1,
    "EnCodec decoder": 0.1,
    "SD decoder": 0.25,
}
"""By network, the extents of its input relative to those of `networks.py`."""

ABOUT = """\
Processor time that the host takes for each operator of a part, beside what its kernels, transfers and exchanges take,
on one thread: `python benchmarks/fitting/host_seconds.py`. Each network has a smaller input, and runs in four parts
within half of its memory.

* **whole**, **parts**: measured seconds of a call or training step; the least of a few.
* **kernels**: seconds that the kernels of all parts are predicted to take, scaled by the whole call's measured over
  predicted seconds.
* **operators**: of all parts, relative to the whole call's.
"""


def smaller(network: Network, scale: float) -> Network:
    """The network with shorter inputs, ready for what is measured."""
    shapes = ([max(int(n * scale), 1) if dim > 1 else n for dim, n in enumerate(x.shape)] for x in network.inputs)
    trained = bool(network.blocks)
    network.model.train(trained).requires_grad_(trained)
    return network._replace(inputs=tuple(map(torch.randn, shapes)))


def seconds(model: nn.Module, network: Network, calls: int) -> float:
    """Processor seconds of the fastest call."""
    found = []
    for _ in range(calls):
        gc.collect()
        began = time.process_time()
        numbers(model, network)
        found.append(time.process_time() - began)
    return min(found)


def measured(name: str, scale: float, calls: int) -> Record:
    """What a network takes whole and in parts."""
    torch.manual_seed(0)
    network = smaller(NETWORKS[name](), scale)
    model, trained, prices = network.model, bool(network.blocks), measured_prices("cpu", torch.float32)
    axis = AXES[network.inputs[0].dim()]
    whole = seconds(copy.deepcopy(model), network, calls)
    with torch.set_grad_enabled(trained):
        timeline = followed(model, network.inputs, {}, trained, prices)
        memory = timeline.peak() // 2
        tape = record_part(model, network.inputs, {}, Partition(((axis, PARTS),)), trained)
    taken = predicted(tape, memory)
    in_parts = seconds(distconv.in_turn(copy.deepcopy(model), f"{axis}={PARTS}", memory=memory), network, calls)
    kernels = taken.work.operations * prices.operation + taken.work.bytes * prices.written
    kernels *= whole / sum(timeline.seconds)
    rest = in_parts - kernels - (taken.moved + taken.exchanged) * prices.received
    return {
        "network": name,
        "whole": whole,
        "parts": in_parts,
        "kernels": kernels,
        "operators": taken.work.operators / len(timeline.seconds),
        "host": rest / taken.work.operators,
    }


def rows(records: list[Record]) -> Iterator[tuple[str, ...]]:
    """A row for each network, and the median."""
    for each in records:
        times = (f"{each[part]:.3f} s" for part in ("whole", "parts", "kernels"))
        yield each["network"], *times, f"{each['operators']:.1f}", f"{1e6 * each['host']:.0f} µs"
    median = statistics.median(each["host"] for each in records)
    yield "median", "", "", "", "", f"{1e6 * median:.0f} µs"


def main() -> None:
    made = parser(__doc__, RESULT)
    made.add_argument("--networks", nargs="+", default=list(SCALES), choices=SCALES, metavar="NETWORK")
    made.add_argument("--calls", type=int, default=4, help="of which the fastest counts (default %(default)s)")
    options = made.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    asked = tqdm(options.networks, unit="network")
    records = [measured(name, SCALES[name], options.calls) for name in asked]
    headings = "network", "whole", "parts", "kernels", "operators", "host's time for an operator"
    finish(
        options,
        RESULT,
        "What the host takes for operators of parts",
        ABOUT,
        [Table("", headings, [*rows(records)])],
        records,
    )


if __name__ == "__main__":
    main()
