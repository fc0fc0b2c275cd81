"""Small collectives of a compiled graph that do not need each other are one: fewer messages, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from compiling import fresh, made, steps, worst
from ranks import Ranks
from torch import Tensor, nn
from torch._C import DispatchKey
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import distconv
from distconv.transfer import graph_merges


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """A bottleneck, whose shortcut is a convolution."""

    def __init__(self, inputs: int, width: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = convolution(inputs, width, 1), convolution(width, width, 3, stride)
        self.third, self.shortcut = convolution(width, outputs, 1), convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = self.third(self.second(self.first(x).relu()).relu())
        return (y + self.shortcut(x)).relu()


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(4, 2, 8, 1), Block(8, 4, 12, 2))
        self.classifier = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.blocks(x).mean((2, 3)))


class Narrow(Blocks):
    """Two channels, of which the third and fourth rank have none."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(4, 2, 2, 1), Block(2, 2, 12, 2))


def trained(partition: str, kind: type[nn.Module], most: int) -> tuple[dict[str, float], list[list[str]], list[bool]]:
    """(errors against one process, the collectives of forward and of backward of training, and of every allreduce by
    Python, as those are by which ranks agree, whether torch's Python dispatcher called it).
    """
    expected = steps(reference := made(kind), reference, 2)
    found: list[list[str]] = []
    dispatched: list[bool] = []
    sent = dist.all_reduce

    def noted(*args: Any, **kwargs: Any) -> Any:
        dispatched.append(torch._C._dispatch_tls_is_dispatch_key_included(DispatchKey.PythonDispatcher))
        return sent(*args, **kwargs)

    def keep(graph: Any, inputs: Any) -> Any:
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        ours = [t._opname for t in targets if getattr(t, "namespace", None) == "_c10d_functional"]
        found.append([name for name in ours if name != "wait_tensor"])
        return graph.forward

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_rematerialization_partition)
    before, graph_merges.MOST = graph_merges.MOST, most
    try:
        with fresh(), mock.patch.object(dist, "all_reduce", noted):
            plain = made(kind)
            model = distconv.parallelize(plain, distconv.init(partition, device_type="cpu"))
            errors = worst(steps(torch.compile(model, backend=backend, fullgraph=True), plain, 2), expected)
    finally:
        graph_merges.MOST = before
    return errors, found[:2], dispatched


@pytest.mark.parametrize(
    "partition, kind, apart, together",
    [
        ("sample=2,channel=2", Blocks, 38, 28),
        ("height=2", Blocks, 22, 18),
        ("channel=4", Narrow, 20, 15),
    ],
)
def test_fewer_collectives_compute_the_same(
    ranks: Callable[[int], Ranks], partition: str, kind: type[nn.Module], apart: int, together: int
) -> None:
    pool = ranks(2 if partition == "height=2" else 4)
    if pool.backend == "mpi":
        pytest.skip("over Gloo")
    for most, expected in ((0, apart), (graph_merges.MOST, together)):
        results = pool.run(trained, partition, kind, most)
        for errors, collectives, dispatched in results:
            assert not errors
            assert dispatched and not any(dispatched)  # or Gloo's threads and this one would wait for one another
            assert collectives == results[0][1]  # or ranks would wait for one another for ever
            assert sum(map(len, collectives)) == expected
