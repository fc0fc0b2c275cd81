"""The cases of benchmarks/distributed/distributed.py in JAX: jit and NamedSharding over host devices, one thread each.

Reads requests, a JSON object per line, and prints an answer to each. Arrays lie as JAX's users lay them on a CPU,
channels last. Every step returns the output and all gradients, so that nothing of it is left out as unused.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.allocator import keep_freed_memory

Parameters = list[Any]
Function = Callable[[Parameters, Any], Any]


class Weights:
    """Draws parameters in the order in which a network names them, and hands them out in that order."""

    def __init__(self) -> None:
        self.values: Parameters = []
        self.generator = np.random.default_rng(0)

    def convolution(self, inputs: int, outputs: int, kernel: int, dims: int, bias: bool = True) -> int:
        shape = (kernel,) * dims + (inputs, outputs)
        scale = (inputs * kernel**dims) ** -0.5
        return self._add(self.generator.normal(size=shape) * scale, *([np.zeros(outputs)] if bias else []))

    def norm(self, channels: int) -> int:
        return self._add(np.ones(channels), np.zeros(channels))

    def _add(self, *values: np.ndarray) -> int:
        self.values += [jnp.asarray(value, jnp.float32) for value in values]
        return len(self.values) - len(values)


LAYOUTS = {2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def convolve(x: Any, w: Any) -> Any:
    dims = x.ndim - 2
    return jax.lax.conv_general_dilated(x, w, (1,) * dims, "SAME", dimension_numbers=LAYOUTS[dims])


def batch_norm(x: Any, scale: Any, shift: Any) -> Any:
    axes = tuple(range(x.ndim - 1))
    mean = x.mean(axes)
    variance = jnp.square(x - mean).mean(axes)
    return (x - mean) * (jax.lax.rsqrt(variance + 1e-5) * scale) + shift


def convolution(channels: int) -> tuple[Function, Parameters]:
    weights = Weights()
    weights.convolution(channels, channels, 3, 2)
    return lambda p, x: convolve(x, p[0]) + p[1], weights.values


def block(channels: int) -> tuple[Function, Parameters]:
    """ResNet-18's basic block."""
    weights = Weights()
    for _ in range(2):
        weights.convolution(channels, channels, 3, 2, bias=False)
        weights.norm(channels)

    def function(p: Parameters, x: Any) -> Any:
        y = jax.nn.relu(batch_norm(convolve(x, p[0]), p[1], p[2]))
        return jax.nn.relu(batch_norm(convolve(y, p[3]), p[4], p[5]) + x)

    return function, weights.values


def unet(width: int = 16, levels: int = 4, classes: int = 3) -> tuple[Function, Parameters]:
    """The 3-D U-Net of mucudnn/networks/models/unet3d.py with batch norm."""
    weights = Weights()

    def layer(inputs: int, outputs: int) -> tuple[int, int]:
        return weights.convolution(inputs, outputs, 3, 3), weights.norm(outputs)

    channels, down, up = 1, [], []
    for level in range(levels):
        outputs = width * 2**level
        down.append((layer(channels, outputs), layer(outputs, 2 * outputs)))
        channels = 2 * outputs
    for level in reversed(range(levels - 1)):
        skip = 2 * width * 2**level
        up.append((weights.convolution(channels, channels, 2, 3), layer(channels + skip, skip), layer(skip, skip)))
        channels = skip
    head = weights.convolution(channels, classes, 1, 3)

    def run(p: Parameters, where: tuple[int, int], x: Any) -> Any:
        at, norm = where
        return jax.nn.relu(batch_norm(convolve(x, p[at]) + p[at + 1], p[norm], p[norm + 1]))

    def function(p: Parameters, x: Any) -> Any:
        skips = []
        for level, (first, second) in enumerate(down):
            if level:
                skips.append(x)
                x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 2, 1), (1, 2, 2, 2, 1), "VALID")
            x = run(p, second, run(p, first, x))
        for at, first, second in up:
            x = jax.lax.conv_transpose(x, p[at], (2, 2, 2), "VALID", dimension_numbers=LAYOUTS[3]) + p[at + 1]
            x = run(p, second, run(p, first, jnp.concatenate([skips.pop(), x], -1)))
        return convolve(x, p[head]) + p[head + 1]

    return function, weights.values


def build(case: str, channels: int) -> tuple[Function, Parameters]:
    return unet() if case == "unet" else block(channels) if case == "block" else convolution(channels)


class Subject:
    """A case whole on one device, and cut over all of them."""

    def __init__(self, case: str, shape: list[int], parts: list[int], input_gradient: bool) -> None:
        function, parameters = build(case, shape[1])
        generator = np.random.default_rng(1)
        x = generator.normal(size=(shape[0], *shape[2:], shape[1])).astype(np.float32)
        grad = generator.normal(size=jax.eval_shape(function, parameters, x).shape).astype(np.float32)

        def step(p: Parameters, x: Any, grad: Any) -> Any:
            if input_gradient:
                y, pull = jax.vjp(function, p, x)
            else:
                y, pull = jax.vjp(lambda p: function(p, x), p)
            return y, pull(grad)

        counts = [parts[0], *parts[2:], 1]
        names = [f"dim{dim}" for dim in range(len(counts))]
        mesh = Mesh(np.array(jax.devices()).reshape(counts), names)
        replicated, cut = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec(*names))
        first = jax.devices()[0]
        whole = [jax.device_put(value, first) for value in (parameters, x, grad)]
        shared = [jax.device_put(parameters, replicated), jax.device_put(x, cut), jax.device_put(grad, cut)]
        made = (cut, (replicated, cut) if input_gradient else (replicated,))
        alone = jax.jit(step).lower(*whole).compile()
        together = jax.jit(step, out_shardings=made).lower(*shared).compile()
        self.arms: dict[str, Callable[[], Any]] = {
            "JAX, one device": lambda: alone(*whole),
            "JAX": lambda: together(*shared),
        }

    def speed(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of every arm, in turn."""
        seconds: dict[str, list[float]] = {name: [] for name in self.arms}
        for _ in range(rounds):
            for name, run in self.arms.items():
                start = time.perf_counter()
                jax.block_until_ready(run())
                seconds[name].append(time.perf_counter() - start)
        return seconds


def main() -> None:
    keep_freed_memory()
    subject: Subject | None = None
    for line in sys.stdin:
        request = json.loads(line)
        if request.pop("do") == "prepare":
            subject = Subject(**request)
            answer: Any = {"version": jax.__version__, "devices": len(jax.devices())}
        else:
            assert subject is not None
            answer = subject.speed(**request)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
