"""Buckets of gradients: planned once for a model, and anew where what is trained, where or in which dtype, changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import distconv
from distconv.model.gradients import bucket_plans


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 2, 3, padding=1))


def frozen(model: nn.Sequential) -> None:
    model[0].requires_grad_(False)


def trained_again(model: nn.Sequential) -> None:
    model[0].requires_grad_(True)


def in_double(model: nn.Sequential) -> None:
    model.double()


def another_weight(model: nn.Sequential) -> None:
    layer = model[2]
    layer.weight = nn.Parameter(layer.weight.detach() * 2)


CHANGES: tuple[Callable[[nn.Sequential], None], ...] = (frozen, trained_again, in_double, another_weight)


def plans_and_errors() -> tuple[bool, list[tuple[bool, float]]]:
    """Whether a second step kept the plans; for each change, whether they were made anew, and the gradients' error."""
    mesh = distconv.init(f"height={dist.get_world_size()}", device_type="cpu")
    alone = network()
    here = distconv.parallelize(copy.deepcopy(alone), mesh)

    def plans() -> Any:
        return bucket_plans(here, own := list(here.parameters()), [mesh] * len(own))

    def error() -> float:
        x = torch.randn(2, 2, 5, 4, generator=torch.Generator().manual_seed(1)).to(next(alone.parameters()).dtype)
        for model in (alone, here):
            model.zero_grad()
            model(x).square().sum().backward()
        pairs = list(zip(here.parameters(), alone.parameters(), strict=True))
        assert all((a.grad is None) == (b.grad is None) for a, b in pairs)
        return max(float((a.grad - b.grad).abs().max()) for a, b in pairs if a.grad is not None and b.grad is not None)

    error()
    first = plans()
    error()
    kept, found = plans() is first, []
    for change in CHANGES:
        before = plans()
        for model in (alone, here):
            change(model)
        worst = error()
        found.append((plans() is not before, worst))
    return kept, found


def test_buckets_are_kept_until_something_changes(ranks: Callable[[int], Ranks]) -> None:
    for kept, found in ranks(2).run(plans_and_errors):
        assert kept
        assert all(anew and error < 1e-4 for anew, error in found), found
