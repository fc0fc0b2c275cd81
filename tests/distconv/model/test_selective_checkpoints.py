"""Selective checkpoints: some results are saved, and the rest of a checkpointed function is computed again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import distconv
from distconv.model import fully_sharded
from distconv.rules.convolution import plan

PRODUCTS = torch.ops.aten.convolution.default, torch.ops.aten.addmm.default


def of_products(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def of_all(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


class Model(nn.Module):
    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.block = nn.Sequential(
            nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU(), nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()
        )
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + checkpoint(self.block, x, use_reentrant=False, context_fn=self.contexts)
        y: Tensor = checkpoint(self.head, x.movedim(1, -1), use_reentrant=False, context_fn=self.contexts)
        return y


def network(policy: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(2)
    return Model(policy).double(), torch.randn(4, 2, 8, 6).double()


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    found: list[Tensor] = distconv.whole_state([x.grad for x in model.parameters()])
    return found


def of_a_rank(partition: str, policy: Any, fully: bool) -> list[Tensor]:
    mesh, (model, x) = distconv.init(partition, device_type="cpu"), network(policy)
    fully_sharded.LEAST_BYTES = 0
    return gradients(distconv.parallelize(model, mesh, shard_parameters=fully), distconv.shard(x, mesh))


@pytest.mark.gloo
@pytest.mark.parametrize("policy", [of_products, of_all])
@pytest.mark.parametrize(("partition", "fully"), [("sample=2", True), ("height=2", False), ("channel=2", False)])
def test_equal_one_process_on_ranks(ranks: Callable[[int], Ranks], partition: str, fully: bool, policy: Any) -> None:
    for found in ranks(2).run(of_a_rank, partition, policy, fully):
        torch.testing.assert_close(found, gradients(*network(policy)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("policy", [of_products, of_all])
@pytest.mark.parametrize("parts", ["sample=2", "height=4"])
def test_equal_one_process_in_parts(parts: str, policy: Any) -> None:
    model, x = network(policy)
    torch.testing.assert_close(
        gradients(distconv.in_turn(model, parts), x), gradients(*network(policy)), rtol=1e-10, atol=1e-12
    )


def test_a_saved_convolution_that_reads_a_halo_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "overlap_pays", lambda *args: True)
    x = torch.randn(1, 2, 64, 6, dtype=torch.float64)
    models = [network(of_products)[0] for _ in range(2)]
    found = gradients(distconv.in_turn(models[0], "height=2"), x)
    torch.testing.assert_close(found, gradients(models[1], x), rtol=1e-10, atol=1e-12)


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts convolutions."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **kwargs or {})


def test_saved_convolutions_are_not_computed_again() -> None:
    counts = []
    for policy in (of_products, []):
        model, x = network(policy)
        with Count() as counter:
            distconv.in_turn(model, "sample=2")(x).sum().backward()
        counts.append(counter.count)
    assert counts == [6, 10]
