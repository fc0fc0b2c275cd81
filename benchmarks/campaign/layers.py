"""The layers that networks of the campaign are drawn from: how each is described, and how it is built from that.

A layer's description is plain values without its input's shape, so that a network from which layers have been taken is
still a network. ``draw(random, shape)`` describes a layer for an input of this shape, ``build(layer, shape)`` makes the
module; either may find that there is none for the shape, which is a `ValueError` or what torch raises.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.campaign.modules import FUNCTIONS, Attention, Function, divisor

Layer = dict[str, Any]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Kind:
    """One sort of layer; ``share`` says how often it is drawn beside the others."""

    share: float
    draw: Callable[[Random, Shape], Layer]
    build: Callable[[Layer, Shape], nn.Module]


def space(shape: Shape) -> int:
    """Dims of space of a map (N, C, spatial...)."""
    if not 3 <= len(shape) <= 5:
        raise ValueError(f"{shape} is no map")
    return len(shape) - 2


def of_dims(name: str, shape: Shape) -> Any:
    """torch's layer of a name for so many dims of space, such as nn.Conv2d."""
    return getattr(nn, f"{name}{space(shape)}d")


def _per_dim(random: Random, shape: Shape, choices: tuple[int, ...]) -> list[int]:
    same = random.random() < 0.6
    drawn = [random.choice(choices) for _ in range(space(shape))]
    return [drawn[0]] * len(drawn) if same else drawn


def _convolution(random: Random, shape: Shape) -> Layer:
    kernel = _per_dim(random, shape, (1, 2, 3, 3, 3, 4, 5, 7))
    dilation = _per_dim(random, shape, (1, 1, 1, 1, 2, 3))
    kind = random.choice(["same"] * 4 + ["near"] * 5 + ["any"])
    if kind == "same":
        stride, padding = [1] * len(kernel), "same"
    else:
        stride = _per_dim(random, shape, (1, 1, 1, 2, 2, 3))
        most = [d * (k - 1) // 2 for k, d in zip(kernel, dilation, strict=True)]
        padding = most if kind == "near" else [random.randint(0, m + 2) for m in most]
    filters = random.choice((1, 2, 3, 4, 4, 5, 6, 8))
    mode = random.choice(["zeros"] * 6 + ["circular", "reflect", "replicate"])
    groups = random.choice((1, 1, 1, 1, 2, 3, shape[1]))
    described = {"kernel": kernel, "stride": stride, "padding": padding, "dilation": dilation, "mode": mode}
    return {"filters": filters, "groups": groups, "bias": random.random() < 0.7, **described}


def _build_convolution(layer: Layer, shape: Shape) -> nn.Module:
    groups = divisor(layer["groups"], shape[1])
    padding = layer["padding"]
    return of_dims("Conv", shape)(
        shape[1],
        -(-layer["filters"] // groups) * groups,
        tuple(layer["kernel"]),
        stride=tuple(layer["stride"]),
        padding=padding if isinstance(padding, str) else tuple(padding),
        dilation=tuple(layer["dilation"]),
        groups=groups,
        bias=layer["bias"],
        padding_mode=layer["mode"],
    )


def _transposed(random: Random, shape: Shape) -> Layer:
    stride = _per_dim(random, shape, (1, 2, 2, 3))
    kernel = _per_dim(random, shape, (1, 2, 3, 4))
    return {
        "filters": random.choice((1, 2, 3, 4, 6)),
        "groups": random.choice((1, 1, 1, 2, shape[1])),
        "bias": random.random() < 0.7,
        "kernel": kernel,
        "stride": stride,
        "padding": [random.randint(0, k // 2) for k in kernel],
        "output_padding": [random.randint(0, s - 1) if random.random() < 0.3 else 0 for s in stride],
        "dilation": _per_dim(random, shape, (1, 1, 1, 2)),
    }


def _build_transposed(layer: Layer, shape: Shape) -> nn.Module:
    groups = divisor(layer["groups"], shape[1])
    sizes = {name: tuple(layer[name]) for name in ("stride", "padding", "output_padding", "dilation")}
    filters = -(-layer["filters"] // groups) * groups
    kind = of_dims("ConvTranspose", shape)
    return kind(shape[1], filters, tuple(layer["kernel"]), groups=groups, bias=layer["bias"], **sizes)


def _pool(random: Random, shape: Shape) -> Layer:
    kernel = _per_dim(random, shape, (1, 2, 2, 3, 3, 4))
    return {
        "of": random.choice(["Max", "Max", "Avg", "Avg", "LP"]),
        "kernel": kernel,
        "stride": _per_dim(random, shape, (1, 2, 2, 3)),
        "padding": [random.randint(0, k // 2) for k in kernel],
        "ceil": random.random() < 0.3,
        "counts_padding": random.random() < 0.5,
        "dilation": random.choice((1, 1, 2)),
    }


def _build_pool(layer: Layer, shape: Shape) -> nn.Module:
    kernel, stride, ceil = tuple(layer["kernel"]), tuple(layer["stride"]), layer["ceil"]
    if layer["of"] == "LP":
        return of_dims("LPPool", shape)(2.0, kernel, stride, ceil)
    padding = tuple(layer["padding"])
    if layer["of"] == "Avg":
        return of_dims("AvgPool", shape)(kernel, stride, padding, ceil, layer["counts_padding"])
    # Of a dilated window that reads nothing but padding, torch 2.13 keeps no place, and backward writes beyond memory.
    dilation = 1 if any(padding) or ceil else layer["dilation"]
    return of_dims("MaxPool", shape)(kernel, stride, padding, dilation=dilation, ceil_mode=ceil)


def _adaptive(random: Random, shape: Shape) -> Layer:
    return {"of": random.choice(["Avg", "Avg", "Max"]), "size": _per_dim(random, shape, (1, 2, 3, 5))}


def _norm(random: Random, shape: Shape) -> Layer:
    return {
        "of": random.choice(["Batch"] * 4 + ["Group"] * 2 + ["Instance", "Layer", "RMS"]),
        "groups": random.choice((1, 2, 3, 4)),
        "affine": random.random() < 0.8,
        "tracks": random.random() < 0.8,
    }


def _build_norm(layer: Layer, shape: Shape) -> nn.Module:
    kind, affine = layer["of"], layer["affine"]
    if kind == "Group":
        return nn.GroupNorm(divisor(layer["groups"], shape[1]), shape[1], affine=affine)
    if kind == "Layer":
        return nn.LayerNorm(
            shape[1:] if len(shape) > 2 and layer["groups"] > 1 else shape[-1:], elementwise_affine=affine
        )
    if kind == "RMS":
        return nn.RMSNorm(shape[-1:], eps=1e-3, elementwise_affine=affine)
    if len(shape) == 2:
        return nn.BatchNorm1d(shape[1], affine=affine, track_running_stats=layer["tracks"])
    return of_dims(f"{kind}Norm", shape)(shape[1], affine=affine, track_running_stats=layer["tracks"])


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": lambda: nn.ReLU(inplace=True),
    "leaky": lambda: nn.LeakyReLU(0.1),
    "leaky in place": lambda: nn.LeakyReLU(0.1, inplace=True),
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "silu in place": lambda: nn.SiLU(inplace=True),
    "elu": nn.ELU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "softplus": nn.Softplus,
    "hardswish": nn.Hardswish,
    "mish": nn.Mish,
    "prelu": nn.PReLU,
    "softmax": lambda: nn.Softmax(1),
    "log softmax": lambda: nn.LogSoftmax(1),
    "glu": lambda: nn.GLU(1),
    "hardtanh": lambda: nn.Hardtanh(-0.7, 0.7),
    "softsign": nn.Softsign,
    "celu": lambda: nn.CELU(0.8),
}


def _resize(random: Random, shape: Shape) -> Layer:
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[space(shape)]
    mode = random.choice(["nearest", "nearest-exact", linear, linear, "area"])
    return {
        "mode": mode,
        "aligned": mode == linear and random.random() < 0.5,
        "size": [max(1, random.choice((n // 2, n - 1, n, n + 1, 2 * n, 2 * n, 5))) for n in shape[2:]],
        "factor": random.choice((0, 0, 2, 0.5, 1.5)),
    }


def _build_resize(layer: Layer, shape: Shape) -> nn.Module:
    space(shape)
    mode = layer["mode"]
    if mode.endswith("linear"):
        mode = {3: "linear", 4: "bilinear", 5: "trilinear"}[len(shape)]
    size = tuple(layer["size"]) if not layer["factor"] else None
    if size is not None and len(size) != len(shape) - 2:
        raise ValueError(f"{size} is not a size of {shape}")
    options: dict[str, Any] = {"align_corners": layer["aligned"]} if mode.endswith("linear") else {}
    factor = float(layer["factor"]) or None
    return Function(lambda x: functional.interpolate(x, size, factor, mode, **options), str(layer))


def _pad(random: Random, shape: Shape) -> Layer:
    return {
        "by": [random.choice((-1, 0, 0, 1, 1, 2)) for _ in range(2 * space(shape))],
        "mode": random.choice(["constant", "constant", "reflect", "replicate", "circular"]),
    }


def _build_pad(layer: Layer, shape: Shape) -> nn.Module:
    by = [n if layer["mode"] == "constant" else max(0, n) for n in layer["by"]]
    if len(by) != 2 * space(shape):
        raise ValueError(f"{by} is no padding of {shape}")
    return Function(lambda x: functional.pad(x, by, layer["mode"]), str(layer))


def _build_function(layer: Layer, shape: Shape) -> nn.Module:
    space(shape)
    return Function(FUNCTIONS[layer["of"]], layer["of"])


def _pixels(layer: Layer, shape: Shape) -> nn.Module:
    if len(shape) != 4:
        raise ValueError("pixels are shuffled in 2-D")
    return nn.PixelUnshuffle(2) if layer["un"] else nn.PixelShuffle(2)


def _build_linear(layer: Layer, shape: Shape) -> nn.Module:
    if len(shape) == 2:
        return nn.Linear(shape[1], layer["features"])
    return nn.Sequential(nn.Flatten(), nn.Linear(torch.Size(shape[1:]).numel(), layer["features"]))


def _adaptive_pool(layer: Layer, shape: Shape) -> nn.Module:
    size = tuple(layer["size"])
    if len(size) != space(shape):
        raise ValueError(f"{size} is not a size of {shape}")
    return of_dims(f"Adaptive{layer['of']}Pool", shape)(size)


LEAVES: dict[str, Kind] = {
    "convolution": Kind(9, _convolution, _build_convolution),
    "transposed": Kind(2, _transposed, _build_transposed),
    "pool": Kind(2.5, _pool, _build_pool),
    "adaptive pool": Kind(0.7, _adaptive, _adaptive_pool),
    "norm": Kind(4, _norm, _build_norm),
    "activation": Kind(
        4, lambda random, _: {"of": random.choice(list(ACTIVATIONS))}, lambda layer, _: ACTIVATIONS[layer["of"]]()
    ),
    "resize": Kind(1.5, _resize, _build_resize),
    "pad": Kind(0.8, _pad, _build_pad),
    "function": Kind(2.5, lambda random, _: {"of": random.choice(list(FUNCTIONS))}, _build_function),
    "pixels": Kind(0.3, lambda random, _: {"un": random.random() < 0.5}, _pixels),
    "attention": Kind(
        0.5,
        lambda random, _: {"heads": random.choice((1, 2, 3))},
        lambda layer, shape: Attention(shape[1], divisor(layer["heads"], shape[1], space(shape) and shape[1])),
    ),
    "linear": Kind(0.5, lambda random, _: {"features": random.choice((1, 3, 5, 8))}, _build_linear),
}
"""Layers that hold no others, by the name in their description."""
