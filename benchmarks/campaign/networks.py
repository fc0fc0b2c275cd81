"""Networks of the campaign: drawn from a seed, described by plain values, and built from those alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.campaign.layers import LEAVES, Layer, Shape
from benchmarks.campaign.modules import Function
from benchmarks.campaign.state import State, drawn, is_drawn

Case = dict[str, Any]
"""A network, its input and how it is run, as plain values."""

MOST_ELEMENTS = 6000
"""No tensor between two layers is drawn larger: time goes into many networks, not into large ones."""

AXES = {3: ("width",), 4: ("height", "width"), 5: ("depth", "height", "width")}
BLOCKS = ("residual", "concatenation", "shared", "checkpoint", "skip")


class Residual(nn.Module):
    """x + body(x) where their shapes agree, else the body alone."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return x + y if x.shape == y.shape else y


class Concatenation(nn.Module):
    """The channels of two branches; those of the second brought to the extents of the first."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), self.second(x)
        if first.shape[2:] != second.shape[2:]:
            second = functional.interpolate(second, size=first.shape[2:])
        return torch.cat((first, second), 1)


class Shared(nn.Module):
    """One body applied twice."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.body(x))


class Checkpointed(nn.Module):
    """A body whose activations are computed again in backward."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


def build(layer: Layer, shape: Shape) -> nn.Module:
    """The module of a description for an input of a shape."""
    kind = layer["kind"]
    if kind in LEAVES:
        return LEAVES[kind].build(layer, shape)
    first, _ = sequence(layer["layers"], shape)
    if kind == "state":
        return State(first, layer, shape)
    if kind == "residual":
        return Residual(first)
    if kind == "shared":
        return Shared(first)
    if kind == "checkpoint":
        return Checkpointed(first)
    if kind == "skip":
        return Concatenation(Function(lambda x: x, "identity"), first)
    return Concatenation(first, sequence(layer["others"], shape)[0])


def sequence(layers: Iterable[Layer], shape: Shape) -> tuple[nn.Module, Shape]:
    """The modules of some layers, one after the other, and the shape that comes out."""
    modules: list[nn.Module] = []
    for layer in layers:
        module = build(layer, shape)
        shape = shape_after(module, shape)
        modules.append(module)
    return nn.Sequential(*modules), shape


def shape_after(module: nn.Module, shape: Shape) -> Shape:
    """The shape of what a module makes of an input in float64; its buffers stay as they are."""
    training = module.training
    with torch.no_grad():
        found = tuple(module.double().eval()(torch.zeros(shape, dtype=torch.float64)).shape)
    module.train(training)
    return found


def network(case: Case) -> tuple[nn.Module, Shape]:
    """The network of a case, with the parameters that its seed gives, and the shape of its output."""
    torch.manual_seed(case["seed"])
    return sequence(case["layers"], tuple(case["shape"]))


def draw(seed: int) -> Case:
    """The case of a seed: the same on every machine with the same torch."""
    random = Random(seed)
    dims = random.choice((1, 2, 2, 2, 2, 3, 3))
    largest = {1: 24, 2: 13, 3: 8}[dims]
    shape = [random.choice((1, 2, 2, 3, 4, 4, 5)), random.choice((1, 2, 3, 4, 4, 6))]
    shape += [random.choice((1, 2, 3, *range(3, largest + 1), *range(3, largest + 1))) for _ in range(dims)]
    if random.random() < 0.01:
        shape[0] = 0
    layers, shape_now = _draw_layers(random, tuple(shape), random.randint(1, 8), depth=0)
    if len(shape_now) > 2 and random.random() < 0.4:
        head, shape_now = _draw_layers(random, shape_now, 1, 2, only="linear")
        layers += head
    partition, ranks = _draw_partition(random, len(shape))
    half = random.random() < 0.06
    compiled = random.random()
    return {
        "seed": seed,
        "shape": shape,
        "layers": layers,
        "partition": partition,
        "ranks": ranks,
        "algorithm": random.choice(("auto", "w") if "filter" in partition else ("auto", "auto", "x", "y")),
        "way": random.choice(("script", "script", "program")),
        "dtype": "bfloat16" if half else "float64",
        "channels_last": dims > 1 and random.random() < 0.2,
        "evaluation": random.random() < 0.1,
        "loss": random.choice(("square", "square", "huber", "classes")),
        "optimizer": random.choice(("SGD", "SGD", "Adam", "AdamW", "RMSprop")),
        "accumulates": random.random() < 0.1,
        "frozen": random.random() < 0.1,
        "limit": random.choice((None,) * 7 + ("4KiB", "64KiB", "unlimited")),
        "policy": random.choice(("powerOfTwo", "all", "undivided")),
        "compiled": "inductor" if compiled < 0.002 else "aot_eager" if compiled < 0.02 else "",
    }


def draw_with_state(seed: int) -> Case:
    """The same in float64, trained, not compiled, and with state in some of its layers, or in one more."""
    case, random = draw(seed), Random(f"state of {seed}")
    shape = tuple(case["shape"])

    def stateful(layers: list[Layer], shape: Shape) -> list[Layer]:
        found = []
        for layer in layers:
            if "layers" in layer:  # a second branch stays as it is
                layer = layer | {"layers": stateful(layer["layers"], shape)}
            elif is_drawn(random, layer):
                layer = _fitting(random, layer, shape)
            found.append(layer)
            shape = shape_after(build(layer, shape), shape)
        return found

    layers = stateful(case["layers"], shape)
    if "state" not in str(layers):
        plain = {"filters": shape[1], "groups": 1, "bias": True, "stride": [1] * (len(shape) - 2), "mode": "zeros"}
        dims = {"kernel": [1] * (len(shape) - 2), "padding": "same", "dilation": [1] * (len(shape) - 2)}
        layers = [_fitting(random, {"kind": "convolution", **plain, **dims}, shape), *layers]
    return case | {"layers": layers, "dtype": "float64", "evaluation": False, "compiled": ""}


def _fitting(random: Random, layer: Layer, shape: Shape) -> Layer:
    """The layer in the first of some blocks with state that can be built around it; alone if there is none."""
    for _ in range(4):
        block = drawn(random, layer)
        try:
            build(block, shape)
        except Exception:
            continue  # torch has no such state for this layer, such as a weight norm of a norm
        return block
    return layer


def _draw_layers(
    random: Random, shape: Shape, count: int, depth: int, only: str | None = None
) -> tuple[list[Layer], Shape]:
    """At most so many layers that follow each other on an input of a shape; fewer where draws do not fit."""
    layers: list[Layer] = []
    for _ in range(4 * count):
        if len(layers) == count:
            break
        try:
            layer = _draw_layer(random, shape, depth, only)
            after = shape_after(build(layer, shape), shape)
        except Exception:
            continue  # no layer of this kind for this shape: what torch accepts, torch knows best
        if math.prod(after) <= MOST_ELEMENTS and (math.prod(after[1:]) > 0):
            layers.append(layer)
            shape = after
    return layers, shape


def _draw_layer(random: Random, shape: Shape, depth: int, only: str | None) -> Layer:
    if only is None and depth < 2 and len(shape) > 2 and random.random() < 0.15:
        layer: Layer = {"kind": random.choice(BLOCKS), "layers": _draw_layers(random, shape, 3, depth + 1)[0]}
        if layer["kind"] == "concatenation":
            layer["others"] = _draw_layers(random, shape, 2, depth + 1)[0]
        return layer
    shares = [kind.share for kind in LEAVES.values()]
    kind = only or random.choices(list(LEAVES), shares)[0]
    if kind == "linear" and only is None and depth:
        kind = "convolution"
    return {"kind": kind, **LEAVES[kind].draw(random, shape)}


def _draw_partition(random: Random, ndim: int) -> tuple[str, int]:
    """A partition over at most 4 ranks of axes that data of so many dims has."""
    ranks = random.choice((1, 2, 2, 3, 4, 4, 4))
    left, sizes = ranks, []
    while left > 1:
        size = random.choice([n for n in range(2, left + 1) if left % n == 0])
        sizes.append(size)
        left //= size
    if ranks == 4 and random.random() < 0.05:
        return "channel=2,filter=2", ranks
    axes = ["sample", "channel", *AXES[ndim], *AXES[ndim]]
    named: dict[str, int] = {}
    for size in sizes or [1]:
        axis = random.choice([axis for axis in axes if axis not in named])
        named[axis] = size
    return ",".join(f"{axis}={size}" for axis, size in named.items()), ranks


def loss_of(case: Case, shape: Shape, like: torch.dtype) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """The loss, and targets for an output of a shape."""
    generator = torch.Generator().manual_seed(case["seed"] + 1)
    if case["loss"] == "classes" and len(shape) > 1 and shape[1] > 1:
        return functional.cross_entropy, torch.randint(shape[1], (shape[0], *shape[2:]), generator=generator)
    targets = torch.randn(shape, dtype=torch.float64, generator=generator).to(like)
    return (functional.huber_loss if case["loss"] == "huber" else functional.mse_loss), targets
