"""A function of the program that calls a model, compiled while another thread runs a compiled model, and by itself.

Prints for each whether the compiler has traced into the model. Dynamo is first imported when distconv is at work.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import torch
from torch import Tensor, nn

import distconv

reached, go_on = Event(), Event()
traced: list[bool] = []


class Layer(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        traced.append(torch.compiler.is_compiling())
        return super().forward(x)


def waits(graph: torch.fx.GraphModule, _: object) -> object:
    def call(*args: Tensor) -> object:
        reached.set()
        assert go_on.wait(60)
        return graph.forward(*args)

    return call


mesh = distconv.init("height=1", device_type="cpu")
compiled = torch.compile(distconv.parallelize(nn.Conv2d(2, 2, 3), mesh), backend=waits)
called = distconv.parallelize(nn.Sequential(Layer(2, 2, 3), nn.ReLU()), mesh)
x = torch.randn(1, 2, 6, 6)
with ThreadPoolExecutor() as pool:
    other = pool.submit(compiled, x)
    assert reached.wait(60)
    torch.compile(lambda x: called(x) * 2, backend="eager")(x)
    go_on.set()
    other.result()
torch.compile(lambda x: called(x) * 3, backend="eager")(x)
print(json.dumps(traced))
