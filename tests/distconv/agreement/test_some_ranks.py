"""Scripts and optimizers on some ranks do not wait for a comparison with the others."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import distconv
from distconv.agreement import ledger
from distconv.model.parallelize import distributed_script
from tests.distconv.agreement.test_agreement import data, net


def on_all_and_then_on_some() -> float:
    losses = []
    for partition, ranks in (("sample=4", range(4)), ("sample=3", range(3))):
        mesh = distconv.init(partition, ranks=ranks, device_type="cpu")
        if dist.get_rank() in ranks:
            with distributed_script(mesh):
                losses.append(net()(data()[0]).square().mean().item())
    return max(losses) - min(losses)


@pytest.mark.gloo
def test_a_script_on_some_ranks_does_not_wait_for_those_of_an_earlier_one(ranks: Callable[[int], Ranks]) -> None:
    assert max(ranks(4).run(on_all_and_then_on_some)) < 1e-6


def some_train_while_all_are_to_compare() -> float:
    """All ranks cut a tensor, which is to be compared; then two train a model, and the others wait for them."""
    everyone = distconv.init("height=4", device_type="cpu")
    some = distconv.init("height=2", ranks=[0, 1], device_type="cpu")
    x, y = data(4)
    whole = distconv.shard(x, everyone)
    if dist.get_rank() < 2:
        model = distconv.parallelize(net(), some)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            nn.functional.cross_entropy(model(distconv.shard(x, some)), y).backward()
            optimizer.step()
    dist.barrier()
    return float((distconv.gather(whole) - x).abs().max())


@pytest.mark.gloo
def test_an_optimizer_on_some_ranks_does_not_wait_for_the_others(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(4).run(some_train_while_all_are_to_compare) == [0.0] * 4


def steps_of_an_optimizer_made_before() -> list[set[int]]:
    """The ranks that step, at the first and at the second step of an optimizer that was made before parameters were
    sharded; another model is garbage on one of the ranks alone."""
    mesh, x = distconv.init("channel=2", device_type="cpu"), data()[0]
    found = []
    with distributed_script(mesh):
        others, model = [net()], net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        others[0](x)
        for _ in range(2):
            model(x).square().mean().backward()
            optimizer.step()
            found.append(ledger._ranks_that_step(optimizer))
            if dist.get_rank() == 1:
                others.clear()
                gc.collect()
    return found


@pytest.mark.gloo
def test_all_ranks_step_whatever_is_garbage_on_one_of_them(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(steps_of_an_optimizer_made_before) == [[{0, 1}, {0, 1}]] * 2
