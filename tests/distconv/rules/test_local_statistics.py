"""Norms of which each rank normalizes by its own part, while the running statistics are those of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from ranks import Ranks
from torch import Tensor, nn

import distconv

pytestmark = pytest.mark.gloo


def local_statistics() -> list[bool]:
    """Each rank normalizes by its own samples; the running statistics are the whole batch's."""
    mesh = distconv.init(f"sample={dist.get_world_size()}", device_type="cpu")
    torch.manual_seed(2)
    plain = nn.BatchNorm2d(2).double()
    model = distconv.parallelize(copy.deepcopy(plain), mesh, batch_norm="local")
    whole = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    x = distconv.shard(whole, mesh).detach().requires_grad_()
    y = model(x)
    own = x.to_local().detach().clone().requires_grad_()
    expected = nn.functional.batch_norm(own, None, None, plain.weight, plain.bias, training=True)
    cotangent = torch.randn(3, 2, 4, 4, dtype=torch.float64)
    part = distconv.shard(cotangent, mesh)
    (y * part).sum().backward()
    (expected * part.to_local()).sum().backward()
    plain(whole)
    result = [
        torch.allclose(y.to_local(), expected, rtol=1e-10),
        torch.allclose(x.grad.to_local(), own.grad, rtol=1e-9, atol=1e-12),
        torch.allclose(model.running_mean, plain.running_mean, rtol=1e-10),
        torch.allclose(model.running_var, plain.running_var, rtol=1e-10),
    ]
    distconv.parallelize(model, mesh, batch_norm="global")
    return result


def test_local_statistics(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(local_statistics) == [[True] * 4] * 2


def running_together(partition: str, samples: int, how: str) -> tuple[list[bool], int]:
    """Whether buffers are those of one process whose norms see what the ranks see, and how many gathers there are."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(4)
    plain = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(3)).double()
    model = distconv.parallelize(nn.Sequential(*copy.deepcopy(plain)), mesh, batch_norm="local")
    called = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
    x = torch.randn(samples, 2, 5, 4, dtype=torch.float64) * 2 + 1
    for _ in range(2):
        with Collectives() as sent, torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            called(distconv.shard(x, mesh))
        parts = x.chunk(dist.get_world_size(), 0 if "sample" in partition else 2)
        for norm in plain:
            _follow(norm, parts)
            parts = tuple(nn.functional.batch_norm(part, None, None, training=True) for part in parts)
    distconv.parallelize(model, mesh, batch_norm="global")
    pairs = zip(model.buffers(), plain.buffers(), strict=True)
    return [torch.allclose(a, b, rtol=1e-10) for a, b in pairs], sum("gather" in name for name in sent.called)


def _follow(norm: nn.Module, parts: tuple[Tensor, ...]) -> None:
    """One process's running statistics over what all ranks' norms see."""
    assert isinstance(norm, nn.BatchNorm2d)
    norm(torch.cat([part.flatten(2).permute(1, 0, 2).flatten(1) for part in parts], 1).t()[:, :, None, None])


# Autocast takes the rule of the operator, the first three the short path of the function.
@pytest.mark.parametrize(
    "partition, samples, how",
    [
        ("sample=2", 4, "eager"),
        ("sample=2", 3, "eager"),
        ("height=2", 2, "eager"),
        ("height=2", 2, "autocast"),
        ("height=2", 2, "compiled"),
    ],
)
def test_running_statistics_come_together(
    ranks: Callable[[int], Ranks], partition: str, samples: int, how: str
) -> None:
    assert ranks(2).run(running_together, partition, samples, how) == [([True] * 9, 1)] * 2
