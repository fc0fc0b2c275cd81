"""bfloat16 on many ranks rounds as it does in one process."""

from __future__ import annotations

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
    """{how: the largest distance from the losses in float64, over eight seeds}, and of the ranks from the plain run."""
    mesh = distconv.init(partition, device_type="cpu")
    errors = dict.fromkeys(("whole", "halves", "ranks", "ranks from whole", "halves from whole"), 0.0)
    for seed in range(8):
        exact, whole, halves = (in_bfloat16(kind, seed) for kind in ("float64", "whole", "halves"))
        with distributed_script(mesh):
            ranks = in_bfloat16("whole", seed)
        for name, a, b in (
            ("whole", whole, exact),
            ("halves", halves, exact),
            ("ranks", ranks, exact),
            ("ranks from whole", ranks, whole),
            ("halves from whole", halves, whole),
        ):
            errors[name] = max(errors[name], *(abs(one - other) for one, other in zip(a, b, strict=True)))
    return errors


@pytest.mark.parametrize("partition", PARTITIONS)
def test_bfloat16_is_as_near_to_float64_as_one_process_is(ranks: Callable[[int], Ranks], partition: str) -> None:
    for found in ranks(4).run(bfloat16_errors, partition):
        assert found["ranks"] < 2 * max(found["whole"], found["halves"]), found
