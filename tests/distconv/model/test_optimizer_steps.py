"""Steps of torch's optimizers on what a rank holds of sharded parameters."""

from __future__ import annotations

import copy
import gc
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import distconv
from distconv.tensors.hooks import before_operators as checks

pytestmark = pytest.mark.gloo

OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.Adadelta(p, lr=0.1),
    lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-3),
    lambda p: torch.optim.Adam(p, lr=1e-3, eps=1e-3, amsgrad=True, foreach=True),
    lambda p: torch.optim.Adamax(p, lr=1e-3, eps=1e-3),
    lambda p: torch.optim.ASGD(p, lr=1e-2),
    lambda p: torch.optim.NAdam(p, lr=1e-3, eps=1e-3),
    lambda p: torch.optim.RAdam(p, lr=1e-3, eps=1e-3),
    lambda p: torch.optim.RMSprop(p, lr=1e-3, eps=1e-3, momentum=0.9, centered=True),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.3, nesterov=False, foreach=True),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
)


def optimizers_steps() -> dict[int, Any]:
    """What goes wrong with each: parameters and states after some steps, and operators on DTensors within a step."""
    mesh, found = distconv.init("channel=2", device_type="cpu"), {}
    x = torch.randn(3, 4, 5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for number, make in enumerate(OPTIMIZERS):
        torch.manual_seed(4)
        plain = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 5, 1)).double()
        nets = plain, distconv.parallelize(copy.deepcopy(plain), mesh)
        optimizers = [make(net.parameters()) for net in nets]
        seen: set[str] = set()

        def noting(func: Any, *_: Any, seen: set[str] = seen) -> None:
            seen.add(str(func))

        for step in range(3):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                net(x).square().mean().backward()
                checks.append(noting)
                optimizer.step()
                checks.remove(noting)
            if not step:
                seen.clear()  # what is kept of each parameter is made here
        expected = [*plain.state_dict().values(), *_kept(optimizers[0])]
        here = [*distconv.whole_state(nets[1].state_dict()).values(), *distconv.whole_state(_kept(optimizers[1]))]
        close = [torch.allclose(a, b, rtol=1e-9, atol=1e-10) for a, b in zip(here, expected, strict=True)]
        if not all(close) or seen or not any(isinstance(kept, DTensor) for kept in _kept(optimizers[1])):
            found[number] = close, seen
    return found


def _kept(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def test_steps_of_torchs_optimizers_run_on_what_a_rank_holds(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(optimizers_steps) == [{}, {}]


KINDS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    lambda p: torch.optim.Adam(p, lr=1e-3),
    lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
)


def tensors_alive() -> list[int]:
    """How many more tensors there are after each step than before it, once all states are made."""
    mesh = distconv.init("channel=2", device_type="cpu")
    net = distconv.parallelize(nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 5, 1)), mesh)
    net(torch.ones(2, 4, 5, 6)).sum().backward()
    gc.collect()
    gc.freeze()  # what is there by now is not counted, and no collection looks through it again
    grown = []
    for make in KINDS:
        optimizer = make(net.parameters())
        counts = []
        for _ in range(5):
            optimizer.step()
            gc.collect()
            counts.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
        grown += [after - before for before, after in itertools.pairwise(counts[1:])]
    return grown


def test_steps_leave_no_tensors_behind(ranks: Callable[[int], Ranks]) -> None:
    assert not any(itertools.chain(*ranks(2).run(tensors_alive)))
