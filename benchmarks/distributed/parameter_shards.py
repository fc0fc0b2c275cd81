"""What `--shard-parameters` saves and costs: a step of a diffusion UNet of 114 million parameters with Adam.

    python benchmarks/distributed/parameter_shards.py [--save]

One process of a fake group of four ranks, with diffusers' UNet2DModel in the widths of google/ddpm-celebahq-256 and
random weights, on four images. Messages are free: times are of the processor, medians of steps in turn with and without
the option. Bytes are those of parameters, gradients and Adam's states; the peak adds the most that a step allocates.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distconv
from benchmarks.allocator import keep_freed_memory
from benchmarks.distributed.host import RANKS, counted, timed
from benchmarks.distributed.host_messages import let_messages_arrive_at_once
from benchmarks.harness import finish, parser
from benchmarks.table import Table

RESULT = "parameter-shards-cpu"
PARTITIONS = ("height=4", "sample=2,height=2", "sample=2,channel=2")
WIDTHS = (128, 128, 256, 256, 512, 512)
PASSES, UPDATE, ROUNDS, SIZE = 0, 1, 9, 64
DOWN = (*["DownBlock2D"] * 4, "AttnDownBlock2D", "DownBlock2D")


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    up = [kind.replace("Down", "Up") for kind in reversed(DOWN)]
    return UNet2DModel(SIZE, block_out_channels=WIDTHS, down_block_types=DOWN, up_block_types=up)


def arm(model: nn.Module, x: Tensor) -> tuple[Callable[[], None], Callable[[], None], Callable[[], int]]:
    """Forward and backward; the optimizer's step; and the bytes of parameters, gradients and states here."""
    optimizer = torch.optim.Adam(model.parameters())

    def passes() -> None:
        optimizer.zero_grad()
        model(x, torch.arange(len(x))).sample.square().mean().backward()

    def size() -> int:
        states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
        tensors: list[Any] = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
        storages = [getattr(x, "_local_tensor", x).untyped_storage() for x in tensors]
        return sum({storage._cdata: storage.nbytes() for storage in storages}.values())

    return passes, optimizer.step, size


def most_allocated(step: Callable[[], None]) -> int:
    """Bytes that it has allocated at most at a time, beyond those from before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def main() -> None:
    options = parser(__doc__, RESULT).parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=RANKS)
    let_messages_arrive_at_once()
    rows = []
    for partition in PARTITIONS:
        mesh = distconv.init(partition, device_type="cpu")
        x = distconv.shard(torch.randn(RANKS, 3, SIZE, SIZE), mesh)
        arms = {}
        for name in ("whole", "sharded"):
            model = distconv.parallelize(unet(), mesh, shard_parameters=name == "sharded")
            one_process = 4 * 4 * sum(p.numel() for p in model.parameters())
            arms[name] = arm(model, x)
        steps = {(name, part): own[part] for name, own in arms.items() for part in (PASSES, UPDATE)}
        times = timed(steps, ROUNDS, ("whole", PASSES))  # type: ignore[type-var]
        sent = counted({name: {} for name in arms}, {name: own[PASSES] for name, own in arms.items()})
        before = [times["whole", part]["ms"] for part in (PASSES, UPDATE)]  # type: ignore[index]
        for name, (passes, _, size) in arms.items():
            own, ms = size(), [times[name, part]["ms"] for part in (PASSES, UPDATE)]  # type: ignore[index]
            sizes = f"{own / 2**20:,.0f}", f"{own / one_process:.3f}", f"{(own + most_allocated(passes)) / 2**20:,.0f}"
            shares = f"{ms[0] / before[0]:.2f}", f"{sum(ms) / sum(before):.2f}"
            messages = f"{sent[name]['collectives']}", f"{sent[name]['bytes'] / 2**20:.0f}"
            rows.append((f"{partition}, {name}", *sizes, *(f"{each:.0f}" for each in ms), *shares, *messages))
    headings = "", "MiB", "of one process", "peak MiB", "passes ms", "update ms", "passes ratio", "step ratio"
    table = Table(f"A step on four images of {SIZE}²", (*headings, "collectives", "MiB given to them"), rows)
    finish(options, RESULT, "Parameters in shards along all axes", __doc__.split("\n\n")[2], [table])


if __name__ == "__main__":
    main()
