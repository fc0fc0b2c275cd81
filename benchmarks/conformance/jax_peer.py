"""JAX: `jit` of arrays with a `NamedSharding`, one process of as many devices as parts.

Reads a request per line and prints an answer to each. The input and the gradient of the output are cut, parameters are
replicated, and JAX chooses how results lie. Every layer is first computed on one device, which must give the numbers of
torch: else it is another layer, and an error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.conformance.cases import Layer, cut_dims, parts
from benchmarks.conformance.jax_layers import Function, build
from benchmarks.conformance.judge import Numbers, judge, read, write

PARAMETER = "parameter "


class AnotherLayer(Exception):
    """On one device a layer does not compute what torch's does."""


def step(function: Function) -> Any:
    """Output, gradients of parameters and gradient of the input, of the gradient of the output."""

    @jax.jit
    def run(p: Any, x: Any, grad: Any) -> Any:
        y, pull = jax.vjp(function, p, x)
        return y, *pull(grad)

    return run


def named(results: Any) -> Numbers:
    y, gradients, x = jax.tree.map(np.asarray, results)
    return {"output": y, "input": x, **gradients}


class Subject:
    """The layer that was asked for last, compared on one device."""

    def __init__(self) -> None:
        self.layer: Layer | None = None

    def open(self, layer: Layer, given: Numbers, expected: Numbers) -> None:
        if layer == self.layer:
            return
        self.run = step(build(layer))
        self.parameters = {n.removeprefix(PARAMETER): v for n, v in given.items() if n.startswith(PARAMETER)}
        outcome, said = judge([named(self.run(self.parameters, given["input"], given["grad"]))], expected)
        if outcome != "right":
            raise AnotherLayer(f"{layer.name}: on one device {said}")
        self.layer = layer

    def compute(self, partition: str, given: Numbers) -> tuple[str, str, Numbers]:
        """(done or refused, what JAX said, the numbers) of the layer under a partition."""
        counts = parts(partition)
        mesh = Mesh(np.array(jax.devices()).reshape(tuple(counts.values())), tuple(counts))
        axes = {dim: axis for axis, dim in cut_dims(partition, given["input"].ndim).items()}
        replicated = NamedSharding(mesh, PartitionSpec())
        cut = NamedSharding(mesh, PartitionSpec(*(axes.get(dim) for dim in range(given["input"].ndim))))
        try:
            x = jax.device_put(given["input"], cut)
        except ValueError as error:  # before anything is computed
            return "refused", f"{error}", {}
        p, grad = jax.device_put((self.parameters, given["grad"]), replicated)
        return "done", "", named(self.run(p, x, grad))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    jax.config.update("jax_enable_x64", True)
    subject = Subject()
    for line in sys.stdin:
        request = json.loads(line)
        if request == {"do": "tell"}:
            told: Any = {"versions": {"jax": jax.__version__}, "ways": [""]}
        else:
            given, layer = read(Path(request["given"])), Layer(**_tuples(request["layer"]))
            subject.open(layer, given, read(Path(request["expected"])))
            try:
                kind, said, numbers = subject.compute(request["partition"], given)
                write(Path(f"{request['found']}-0.npz"), numbers)
            except Exception as error:
                kind, said = "crash", f"{type(error).__name__}: {error}"
            told = (kind, " ".join(said.split())[:400])
        print(json.dumps(told), file=answers, flush=True)


def _tuples(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    if isinstance(value, list):
        return tuple(_tuples(v) for v in value)
    return {k: _tuples(v) for k, v in value.items()} if isinstance(value, dict) else value


if __name__ == "__main__":
    main()
