"""bfloat16 on many ranks rounds as it does in one process."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import nn

import distconv
from distconv.model.parallelize import distributed_script

PARTITIONS = ["sample=2,height=2", "sample=2,channel=2"]


def in_bfloat16(kind: str, seed: int) -> list[float]:
    """The losses of three steps: under autocast, in float64, or with each batch in halves whose gradients add up."""
    generator, found = torch.Generator().manual_seed(seed), []
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2))
    dtype = torch.float64 if kind == "float64" else torch.float32
    model = model.to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        x = torch.randn(8, 2, 24, 24, generator=generator).to(dtype)
        y = torch.randint(0, 4, (8,), generator=generator)
        optimizer.zero_grad()
        losses = []
        for part in (slice(0, 4), slice(4, 8)) if kind == "halves" else (slice(0, 8),):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind != "float64"):
                loss = nn.functional.cross_entropy(model(x[part]).mean((2, 3)), y[part])
            loss = loss / (2 if kind == "halves" else 1)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        found.append(sum(losses))
    return found


def bfloat16_errors(partition: str) -> dict[str, float]:
    """{how: root of the mean squared distance to the losses in float64}, over the three steps of sixteen seeds.

    A mean rather than the largest: which of the few losses rounds worst depends on the processor's bfloat16 kernels.
    """
    mesh = distconv.init(partition, device_type="cpu")
    squares: dict[str, list[float]] = {"whole": [], "halves": [], "ranks": []}
    for seed in range(16):
        exact = in_bfloat16("float64", seed)
        with distributed_script(mesh):
            ranks = in_bfloat16("whole", seed)
        whole, halves = (in_bfloat16(kind, seed) for kind in ("whole", "halves"))
        for name, losses in (("whole", whole), ("halves", halves), ("ranks", ranks)):
            squares[name] += [(one - other) ** 2 for one, other in zip(losses, exact, strict=True)]
    return {name: math.sqrt(statistics.fmean(each)) for name, each in squares.items()}


@pytest.mark.parametrize("partition", PARTITIONS)
def test_bfloat16_is_as_near_to_float64_as_one_process_is(ranks: Callable[[int], Ranks], partition: str) -> None:
    for found in ranks(4).run(bfloat16_errors, partition):
        assert found["ranks"] < 1.5 * max(found["whole"], found["halves"]), found
