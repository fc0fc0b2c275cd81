"""What inductor finds of earlier starts: the graphs of the rank itself."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.utils import counters

import distconv


class Pool(nn.Module):
    """Each rank has halos of its own; without parameters, the compiler takes the graph to be that of any rank."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.max_pool2d(x.sin(), 3, 2, 1)


def largest(model: Callable[[Tensor], Tensor], x: Tensor, expected: tuple[Tensor, Tensor]) -> float:
    """The largest error of the result, and of the input's gradient."""
    given = x.clone().requires_grad_()
    y = distconv.gather(model(given))
    y.square().sum().backward()
    return max(
        float((found - right).detach().abs().max()) for found, right in zip((y, given.grad), expected, strict=True)
    )


def started(partition: str, folder: str) -> list[tuple[float, int, int]]:
    """Errors of two starts, each with how often a traced graph was found, and one before it was traced."""
    mesh = distconv.init(partition, device_type="cpu")
    x = torch.randn(2, 3, 12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = x.clone().requires_grad_()
    y = Pool()(given)
    y.square().sum().backward()
    found = []
    with mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": folder}):
        for _ in range(2):
            torch._dynamo.reset()
            counters.clear()
            model = torch.compile(distconv.parallelize(Pool(), mesh), fullgraph=True)
            error = largest(lambda x, model=model: model(distconv.shard(x, mesh)), x, (y.detach(), given.grad))
            traced = counters["inductor"]["fxgraph_cache_hit"]
            found.append((error, traced, counters["aot_autograd"]["autograd_cache_hit"]))
        torch._dynamo.reset()
    return found


def test_a_second_start_does_not_find_another_ranks_graph(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    pool = ranks(2)
    if pool.backend == "mpi":
        pytest.skip("over Gloo")
    for (error, _, _), (again, traced, whole) in pool.run(started, "height=2", str(tmp_path)):
        assert error < 1e-12 and again < 1e-12
        assert traced > 0 and whole == 0
