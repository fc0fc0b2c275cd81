"""Layers with their geometry, and the partitions of their inputs: plain values, which every library translates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

Shape = tuple[int, ...]

SPACE = ("depth", "height", "width")


@dataclass(frozen=True)
class Layer:
    """A layer and the shape (N, C, spatial...) of its input; sizes in its options have one number per spatial dim."""

    name: str
    kind: str
    shape: Shape
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A layer under a partition such as "sample=2,height=2"."""

    layer: Layer
    partition: str

    @property
    def ranks(self) -> int:
        return math.prod(parts(self.partition).values())


MAP = (4, 8, 16, 16)
ODD = (4, 8, 17, 19)
VOLUME = (2, 4, 8, 8, 8)
LINE = (4, 8, 24)

PARTITIONS = {
    1: ("sample=2", "width=2", "channel=2", "width=4", "sample=2,width=2", "sample=2,channel=2", "channel=2,width=2"),
    2: (
        "sample=2",
        "height=2",
        "width=2",
        "channel=2",
        "width=4",
        "height=2,width=2",
        "sample=2,height=2",
        "sample=2,channel=2",
        "channel=2,width=2",
    ),
    3: (
        "sample=2",
        "depth=2",
        "channel=2",
        "depth=4",
        "height=2,width=2",
        "sample=2,depth=2",
        "channel=2,width=2",
    ),
}
"""By the number of spatial dims."""


def parts(partition: str) -> dict[str, int]:
    """Parts by axis."""
    return {axis: int(count) for axis, count in (entry.split("=") for entry in partition.split(","))}


def cut_dims(partition: str, dims: int) -> dict[str, int]:
    """Which dim of a tensor (N, C, spatial...) each axis of a partition cuts."""
    places = {"sample": 0, "channel": 1} | {axis: dims - 3 + SPACE.index(axis) for axis in SPACE}
    return {axis: places[axis] for axis in parts(partition)}


def kind_of(partition: str) -> str:
    """sample, channel or space, or mixed."""
    kinds = {"space" if axis in SPACE else axis for axis in parts(partition)}
    return kinds.pop() if len(kinds) == 1 else "mixed"


def _convolution(name: str, kernel: Any, shape: Shape = MAP, **options: Any) -> Layer:
    """Of 8 filters; numbers given once hold for every spatial dim."""
    return Layer(name, "convolution", shape, _sizes(shape, {"kernel": kernel, "filters": 8, **options}))


def _transposed(name: str, kernel: Any, shape: Shape = MAP, **options: Any) -> Layer:
    return Layer(f"transposed {name}", "transposed", shape, _sizes(shape, {"kernel": kernel, "filters": 8, **options}))


def _pool(name: str, of: str, kernel: Any, shape: Shape = MAP, **options: Any) -> Layer:
    return Layer(name, "pool", shape, _sizes(shape, {"of": of, "kernel": kernel, **options}))


def _sizes(shape: Shape, options: dict[str, Any]) -> dict[str, Any]:
    """Every size of a layer, with those that are not given."""
    filled: dict[str, Any] = {"stride": 1, "padding": 0, "dilation": 1, "output_padding": 0, **options}
    for name in ("kernel", "stride", "padding", "dilation", "output_padding"):
        if isinstance(filled[name], int):
            filled[name] = (filled[name],) * (len(shape) - 2)
    return filled


def convolutions() -> list[Layer]:
    return [
        _convolution("3x3, padding 1", 3, padding=1),
        _convolution("3x3, no padding", 3),
        _convolution("1x1", 1),
        _convolution("1x1, stride 2", 1, stride=2),
        _convolution("2x2, no padding (even)", 2),
        _convolution("4x4, padding same (even)", 4, padding="same"),
        _convolution("4x4, stride 2, padding 1 (even)", 4, stride=2, padding=1),
        _convolution("4x4, stride 4 (patches)", 4, stride=4),
        _convolution("3x3, stride 2, padding 1", 3, stride=2, padding=1),
        _convolution("3x3, stride 2, padding 1, 17x19", 3, ODD, stride=2, padding=1),
        _convolution("3x3, stride 3, no padding, 17x19", 3, ODD, stride=3),
        _convolution("5x5, padding 2, 17x19", 5, ODD, padding=2),
        _convolution("7x1, padding 3x0", (7, 1), padding=(3, 0)),
        _convolution("1x7, stride 1x2, padding 0x3", (1, 7), stride=(1, 2), padding=(0, 3)),
        _convolution("11x11, padding 5 (more than a shard)", 11, padding=5),
        _convolution("3x3, dilation 2, padding 2", 3, padding=2, dilation=2),
        _convolution("3x3, dilation 3, stride 2, padding 1", 3, padding=1, dilation=3, stride=2),
        _convolution("3x3, 4 groups, padding 1", 3, padding=1, groups=4),
        _convolution("5x5, depthwise, padding 2", 5, padding=2, groups=8),
        _convolution("3x3, circular", 3, padding=1, mode="circular"),
        _convolution("3x3, reflect", 3, padding=1, mode="reflect"),
        _convolution("3x3, replicate", 3, padding=1, mode="replicate"),
        _convolution("3, padding 1, 1-D", 3, LINE, padding=1),
        _convolution("5, stride 2, dilation 2, padding 2, 1-D", 5, LINE, stride=2, dilation=2, padding=2),
        _convolution("3x3x3, padding 1, 3-D", 3, VOLUME, padding=1),
        _convolution("2x2x2, stride 2, 3-D", 2, VOLUME, stride=2),
    ]


def transposed() -> list[Layer]:
    return [
        _transposed("2x2, stride 2", 2, stride=2),
        _transposed("3x3, padding 1", 3, padding=1),
        _transposed("4x4, stride 2, padding 1", 4, stride=2, padding=1),
        _transposed("3x3, stride 2, output padding 1, 17x19", 3, ODD, stride=2, padding=1, output_padding=1),
        _transposed("3x3, dilation 2", 3, dilation=2),
        _transposed("3x3, stride 3, 2 groups", 3, stride=3, groups=2),
        _transposed("2x2x2, stride 2, 3-D", 2, VOLUME, stride=2),
    ]


def pools() -> list[Layer]:
    return [
        _pool("max 2x2, stride 2", "max", 2, stride=2),
        _pool("max 3x3, stride 2, padding 1 (overlap)", "max", 3, stride=2, padding=1),
        _pool("max 3x3, stride 1, padding 1 (overlap)", "max", 3, padding=1),
        _pool("max 3x3, stride 2, ceil, 17x19", "max", 3, ODD, stride=2, ceil=True),
        _pool("max 2x2, stride 1, dilation 2", "max", 2, dilation=2),
        _pool("mean 2x2, stride 2", "mean", 2, stride=2),
        _pool("mean 3x3, stride 2, padding 1 (overlap)", "mean", 3, stride=2, padding=1),
        _pool("mean 3x3, stride 1, padding not counted", "mean", 3, padding=1, counts_padding=False),
        _pool("max 2x2x2, stride 2, 3-D", "max", 2, VOLUME, stride=2),
        Layer("mean to 1x1", "adaptive", MAP, {"of": "mean", "size": (1, 1)}),
        Layer("mean to 5x7", "adaptive", MAP, {"of": "mean", "size": (5, 7)}),
        Layer("max to 5x7", "adaptive", MAP, {"of": "max", "size": (5, 7)}),
    ]


def others() -> list[Layer]:
    return [
        Layer("batch norm", "norm", MAP, {"of": "batch"}),
        Layer("batch norm, 17x19", "norm", ODD, {"of": "batch"}),
        Layer("group norm, 4 groups", "norm", MAP, {"of": "group"}),
        Layer("instance norm", "norm", MAP, {"of": "instance"}),
        Layer("layer norm of channels", "norm", MAP, {"of": "layer"}),
        Layer("nearest to 32x32", "resize", MAP, {"mode": "nearest", "size": (32, 32), "corners": False}),
        Layer("bilinear to 32x32", "resize", MAP, {"mode": "bilinear", "size": (32, 32), "corners": False}),
        Layer("bilinear to 27x23", "resize", MAP, {"mode": "bilinear", "size": (27, 23), "corners": False}),
        Layer(
            "bilinear to 31x31, aligned corners", "resize", MAP, {"mode": "bilinear", "size": (31, 31), "corners": True}
        ),
        Layer("pixel shuffle 2", "shuffle", MAP, {"factor": 2}),
        Layer("softmax of channels", "softmax", MAP, {"dim": 1}),
        Layer("softmax of rows", "softmax", MAP, {"dim": 3}),
        Layer("self-attention of all pixels", "attention", (4, 8, 8, 8), {"heads": 2}),
        Layer("residual block", "block", MAP),
        Layer("flatten, linear", "head", MAP, {"classes": 6}),
    ]


def layers() -> list[tuple[str, Layer]]:
    """Every layer with its family."""
    families = {"convolution": convolutions(), "transposed": transposed(), "pool": pools()}
    named = {"norm": "norm", "resize": "resize", "shuffle": "resize", "attention": "attention"}
    listed = [(family, layer) for family, group in families.items() for layer in group]
    return listed + [(named.get(layer.kind, "other"), layer) for layer in others()]


def cases() -> Iterator[tuple[str, Case]]:
    """Every case with its family."""
    for family, layer in layers():
        for partition in PARTITIONS[len(layer.shape) - 2]:
            yield family, Case(layer, partition)
