"""Compiled graphs are called beneath autograd, but for those with operators that may need it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiling import fresh, made, steps, worst
from ranks import Ranks
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

import distconv
from distconv.transfer.graph_calls import beneath_autograd


class Layer(nn.Module):
    """A convolution, whose halos are exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.convolution(x).mean((2, 3))
        return result


def autograd_is_left_out() -> bool:
    excluded: bool = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
    return excluded


def trained(partition: str) -> tuple[dict[str, float], list[bool], bool]:
    """(errors against one process, whether autograd was left out of the graphs that were called, and afterwards)."""
    expected = steps(reference := made(Layer), reference, 2)
    found: list[bool] = []

    def watched(graph: Any, inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            found.append(autograd_is_left_out())
            return graph.forward(*args)

        return call

    backend = aot_autograd(fw_compiler=watched, bw_compiler=watched, partition_fn=min_cut_rematerialization_partition)
    with fresh():
        plain = made(Layer)
        model = distconv.parallelize(plain, distconv.init(partition, device_type="cpu"))
        errors = worst(steps(torch.compile(model, backend=backend, fullgraph=True), plain, 2), expected)
    return errors, found, autograd_is_left_out()


def test_both_directions_are_called_beneath_autograd(ranks: Callable[[int], Ranks]) -> None:
    for errors, inside, afterwards in ranks(2).run(trained, "height=2"):
        assert not errors
        assert inside == [True] * 5  # two steps, and an evaluation
        assert not afterwards


@pytest.mark.parametrize("operator, left_out", [("aten::neg", True), ("program::slope", False)])
def test_an_operator_of_the_program_keeps_autograd(operator: str, left_out: bool) -> None:
    library = torch.library.Library("program", "FRAGMENT")
    library.define("slope(Tensor x) -> Tensor")
    library.impl("slope", _slope, "CPU")
    space, name = operator.split("::")
    graph = fx.Graph()
    x = graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (graph.placeholder("x"),))
    graph.output(graph.call_function(getattr(getattr(torch.ops, space), name).default, (x,)))
    found: list[bool] = []

    def compiler(module: fx.GraphModule, inputs: Any) -> Any:
        def call(x: Tensor) -> Tensor:
            found.append(autograd_is_left_out())
            result: Tensor = module(x)
            return result

        return call

    call = beneath_autograd(compiler)(fx.GraphModule(nn.Module(), graph), ())
    with torch.no_grad():
        assert call(torch.tensor([-3.0])).item() == (3 if left_out else -6)
    assert found == [left_out]


def _slope(x: Tensor) -> Tensor:
    with torch.enable_grad():
        given = x.detach().clone().requires_grad_()
        return torch.autograd.grad(given.square().sum(), given)[0]
