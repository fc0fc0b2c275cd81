"""The graphs of compiled distributed models: which collectives they have, and what comes between one and its wait."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from compiling import fresh, made
from ranks import Ranks
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import distconv
from distconv.model import homes
from distconv.rules.convolution import plan
from distconv.transfer import graph_merges


class Halos(nn.Module):
    """Halos between neighbours in both directions, and some in one only."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def traced_operators(partition: str) -> dict[str, list[str]]:
    """The collectives, waits and convolutions of the graphs of a model with edges and buckets, in their order."""
    found: dict[str, list[str]] = {}

    def keep(which: str) -> Any:
        def compile(graph: Any, inputs: Any) -> Any:
            names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
            kept = ("_c10d_functional", "convolution", "batch_norm_backward")
            found[which] = [name.split(".")[1] for name in names if any(part in name for part in kept)]
            return graph.forward

        return compile

    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=min_cut_rematerialization_partition
    )
    kept = homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES, plan.LEAST_BYTES, graph_merges.MOST
    homes.FIRST_BUCKET_BYTES = homes.BUCKET_BYTES = 64
    plan.LEAST_BYTES = graph_merges.MOST = 0
    try:
        with fresh():
            model = distconv.parallelize(made(Halos), distconv.init(partition, device_type="cpu"))
            torch.compile(model, backend=backend, fullgraph=True)(torch.ones(1, 2, 40, 5).double()).sum().backward()
    finally:
        homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES, plan.LEAST_BYTES, graph_merges.MOST = kept
    return found


def test_waits_come_after_what_does_not_need_them(ranks: Callable[[int], Ranks]) -> None:
    first, *others = ranks(2).run(traced_operators, "height=2")
    collectives = ("all_to_all_single", "all_gather_into_tensor", "all_reduce", "wait_tensor")
    for other in others:  # or ranks would wait for one another for ever, though some receive nothing
        for which, names in other.items():
            assert [n for n in names if n in collectives] == [n for n in first[which] if n in collectives]
    forward, backward = first["forward"], first["backward"]
    assert forward[:3] == ["all_to_all_single", "convolution", "wait_tensor"]
    assert backward.count("all_reduce") > 2  # one of batch norm, and one of each bucket
    assert backward[-1] == "wait_tensor"
    assert "convolution_backward" in backward[backward.index("all_reduce") : backward.index("wait_tensor", -2)]


def test_running_statistics_of_split_channels_cross_once_behind_all_else(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(traced_operators, "channel=2"):
        forward = found["forward"]
        assert forward.count("all_gather_into_tensor") == 1
        assert "convolution" not in forward[forward.index("all_gather_into_tensor") :]
