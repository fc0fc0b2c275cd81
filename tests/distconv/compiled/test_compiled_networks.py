"""Whole networks compiled, in float64: losses and gradients of one process and of ranks without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import distconv
from benchmarks.networks import NETWORKS
from distconv.model import homes
from distconv.rules.convolution import plan
from distconv.transfer import graph_merges

STEPS = 2

Trained = list[dict[str, Tensor]]
"""The loss and all gradients of each step."""


class Call(NamedTuple):
    """An operator of a graph."""

    name: str
    is_flat: bool
    """Whether its result is one tensor of one dim: as is that of the allreduce of a bucket, not that of a norm."""
    waits_for: int | None
    """Of a wait: the place of what has started what it waits for."""


Graphs = dict[str, list[Call]]
"""The operators of the graphs forward and backward, in their order."""


def trained(name: str, partition: str | None, backend: Any = None) -> Trained:
    """Some steps of a small form of a network: plain, or on ranks, or compiled there."""
    network = NETWORKS[name].small()
    torch.manual_seed(0)
    plain = model = network.build()
    if partition is not None:
        model = distconv.parallelize(plain, distconv.init(partition, device_type="cpu"))
    if backend is not None:
        model = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(plain.parameters(), lr=1e-4, momentum=0.9)
    steps: Trained = []
    for step in range(STEPS):
        inputs, targets = network.sample(network.batch, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = network.loss(model(inputs), targets)
        loss.backward()
        found = {key: distconv.whole_state(p.grad).clone() for key, p in plain.named_parameters()}
        steps.append({"loss": torch.tensor(loss.item(), dtype=torch.float64), **found})
        optimizer.step()
    return steps


def errors(found: Trained, expected: Trained) -> dict[str, float]:
    """Those above 1e-10, relative to the largest element; for nothing but rounding errors, to that of all gradients."""
    worst: dict[str, float] = {}
    for step, (own, right) in enumerate(zip(found, expected, strict=True)):
        assert own.keys() == right.keys()
        largest = max(float(gradient.abs().max()) for gradient in right.values())
        for name, value in right.items():
            scale = max(float(value.abs().max()), 1e-3 * largest)
            worst[f"{name}, step {step}"] = float((own[name] - value).abs().max()) / scale
    return {name: error for name, error in worst.items() if not error <= 1e-10}


def compiled(name: str, partition: str) -> tuple[dict[str, float], dict[str, float], list[str], Graphs]:
    """(errors against one process, against ranks without a compiler, the graphs that were made, the last of them)."""
    made: list[str] = []
    graphs: Graphs = {}

    def keep(which: str) -> Any:
        def compile(graph: Any, inputs: Any) -> Any:
            made.append(which)
            nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
            places = {node: place for place, node in enumerate(nodes)}
            graphs[which] = []
            for node in nodes:
                value = node.meta.get("val")
                waits = "wait_tensor" in str(node.target)
                is_flat = isinstance(value, Tensor) and value.dim() == 1
                graphs[which].append(Call(str(node.target), is_flat, places.get(node.args[0]) if waits else None))
            return graph.forward

        return compile

    backend = aot_autograd(
        fw_compiler=keep("forward"), bw_compiler=keep("backward"), partition_fn=min_cut_rematerialization_partition
    )
    kept = homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES, plan.LEAST_BYTES, graph_merges.MOST
    homes.FIRST_BUCKET_BYTES = homes.BUCKET_BYTES = 1 << 13
    plan.LEAST_BYTES = graph_merges.MOST = 0  # buckets as small as these would be merged
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    try:
        alone, uncompiled = trained(name, None), trained(name, partition)
        found = trained(name, partition, backend)
        return errors(found, alone), errors(found, uncompiled), made, graphs
    finally:
        homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES, plan.LEAST_BYTES, graph_merges.MOST = kept
        torch.set_num_threads(threads)
        torch._dynamo.reset()


def between(calls: list[Call], name: str, wait: int) -> int:
    """How many operators of a name stand between what a wait waits for and the wait."""
    started = calls[wait].waits_for
    return 0 if started is None else sum(name in call.name for call in calls[started:wait])


def check_overlap(graphs: Graphs) -> None:
    """Convolutions stand between halos that start and their waits; most of backward behind the first bucket's start."""
    for which, name in (("forward", "aten.convolution.default"), ("backward", "aten.convolution_backward")):
        calls = graphs[which]
        waits = [place for place, call in enumerate(calls) if call.waits_for is not None]
        exchanges = [place for place in waits if "all_to_all" in calls[calls[place].waits_for or 0].name]
        assert sum(between(calls, name, place) > 0 for place in exchanges) >= 5
    calls = graphs["backward"]
    buckets = [place for place, call in enumerate(calls) if "all_reduce" in call.name and call.is_flat]
    assert len(buckets) >= 3
    convolutions = [place for place, call in enumerate(calls) if "convolution_backward" in call.name]
    assert sum(place > buckets[0] for place in convolutions) > len(convolutions) / 2
    waits = [place for place, call in enumerate(calls) if call.waits_for in buckets]
    assert len(waits) == len(buckets)
    assert min(waits) > max(convolutions)


@pytest.mark.parametrize(
    "name, partition",
    [
        ("resnet18", "height=2"),
        ("unet3d", "depth=2"),
        ("cosmoflow", "channel=2"),
    ],
)
def test_compiled_networks_equal_one_process(ranks: Callable[[int], Ranks], name: str, partition: str) -> None:
    pool = ranks(2)
    if pool.backend == "mpi":
        pytest.skip("over Gloo")
    for against_one, against_uncompiled, made, graphs in pool.run(compiled, name, partition):
        assert not against_one
        assert not against_uncompiled
        assert made == ["forward", "backward"]
        if name == "resnet18":
            check_overlap(graphs)
