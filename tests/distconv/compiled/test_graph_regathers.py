"""Parameters that are sharded along all axes, in compiled graphs: backward gathers them again; forward keeps none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
from ranks import Ranks
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

import distconv
from distconv.model import fully_sharded

WHOLE = [(8, 3, 3, 3), (8, 8, 3, 3), (6, 8, 3, 3)]
"""The shapes of the parameters."""


class Graphs:
    """A backend that keeps how many gathers graphs have, and the shapes of what forward saves for backward."""

    def __init__(self, partition: Any) -> None:
        self.gathers: dict[str, int] = {}
        self.saved: list[tuple[int, ...]] = []
        compilers = {"fw_compiler": self._compiler("forward"), "bw_compiler": self._compiler("backward")}
        self.backend: Any = aot_autograd(**compilers, partition_fn=partition)

    def _compiler(self, name: str) -> Any:
        def compiled(graph: fx.GraphModule, _: Any) -> Any:
            gather = torch.ops._c10d_functional.all_gather_into_tensor.default
            self.gathers[name] = sum(node.target is gather for node in graph.graph.nodes)
            if name == "forward":
                (results,) = graph.graph.output_node().args
                self.saved = [tuple(node.meta["val"].shape) for node in results]  # type: ignore[union-attr]
            return make_boxed_func(graph)

        return compiled


def step(rows: int, partition: Any) -> tuple[dict[str, int], int, float]:
    """Gathers by graph, how many whole parameters are saved, and the error of a gradient."""
    fully_sharded.LEAST_BYTES = 0
    mesh = distconv.init("height=4", device_type="cpu")
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Conv2d(a, b, 3, padding=1, bias=False) for a, b in ((3, 8), (8, 8), (8, 6)))).double()
    x = torch.randn(2, 3, rows, 8, dtype=torch.float64)
    (right,) = torch.autograd.grad(net(x).square().mean(), net[0].weight)
    graphs = Graphs(partition)
    model = torch.compile(distconv.parallelize(net, mesh, shard_parameters=True), backend=graphs.backend)
    distconv.gather(model(distconv.shard(x, mesh))).square().mean().backward()
    error = float((distconv.gather(net[0].weight.grad) - right).abs().max())
    return graphs.gathers, sum(shape in WHOLE for shape in graphs.saved), error


PARTITIONS = (default_partition, min_cut_rematerialization_partition)


@pytest.mark.gloo
@pytest.mark.parametrize("partition", PARTITIONS)
def test_backward_gathers_what_it_reads(ranks: Callable[[int], Ranks], partition: Any) -> None:
    for gathers, saved, error in ranks(4).run(step, 8, partition):
        assert gathers == {"forward": 3, "backward": 3} and saved == 0 and error < 1e-12


@pytest.mark.gloo
@pytest.mark.parametrize("partition", PARTITIONS)
def test_a_rank_without_rows_gathers_what_others_do(ranks: Callable[[int], Ranks], partition: Any) -> None:
    found = ranks(4).run(step, 3, partition)
    assert all(gathers == found[0][0] and error < 1e-12 for gathers, _, error in found)
