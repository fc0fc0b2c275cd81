"""What benchmarks/gpu/gpu.py measures: layers, precisions, and the units that its work is cut into."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.layers.layer import Layer, convolutions
from benchmarks.networks import NETWORKS
from mucudnn.convolution.problem import ConvProblem, Direction

MIB = 2**20
LIMITS = tuple(size * MIB for size in (0, 8, 64, 128, 256, 512))
DEEPBENCH = Path(__file__).with_name("deepbench_n256.csv")
"""The distinct 3x3 and 5x5 convolutions of DeepBench (Baidu Research, github.com/baidu-research/DeepBench, training
set), all at a mini-batch of 256."""

ITERATIONS = ("alexnet", "resnet18", "resnet50", "vgg16", "unet3d", "cosmoflow")
SMALL_ITERATIONS = tuple(NETWORKS[name].small().name for name in ITERATIONS)
"""Narrow, on small samples, to try the script with; asked for by name only."""

REQUIRED = (
    *("batch", "in_channels", "height", "width", "out_channels", "kernel_h", "kernel_w"),
    *("pad_h", "pad_w", "stride_h", "stride_w"),
)
OPTIONAL = {"dilation_h": 1, "dilation_w": 1, "groups": 1}
LEAST = {"pad_h": 0, "pad_w": 0}
"""Of other columns the least number is 1."""


@dataclass(frozen=True)
class Precision:
    """How convolutions compute, and how their tensors lie in memory.

    Attributes:
        dtype: of the tensors.
        tf32: whether float32 products may be rounded to TF32.
        memory_format: "contiguous" or "channels_last".
    """

    name: str
    dtype: str
    tf32: bool
    memory_format: str

    def apply(self) -> None:
        """Sets torch's switches, cuDNN's search for the fastest kernel among them, in this process."""
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.conv.fp32_precision = "tf32" if self.tf32 else "ieee"
        torch.backends.cuda.matmul.fp32_precision = "tf32" if self.tf32 else "ieee"


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", "float32", False, "contiguous"),
        Precision("tf32", "float32", True, "contiguous"),
        Precision("float16-nchw", "float16", False, "contiguous"),
        Precision("bfloat16-nchw", "bfloat16", False, "contiguous"),
        Precision("float16", "float16", False, "channels_last"),
        Precision("bfloat16", "bfloat16", False, "channels_last"),
    )
}


class LayersError(ValueError):
    """A table of layers is not accepted; the message is one line."""


@dataclass(frozen=True)
class LayerUnit:
    """A layer in one direction and precision under one policy (the undivided plans are always measured beside)."""

    group: str
    layer: Layer
    precision: str
    direction: str
    policy: str

    @property
    def key(self) -> str:
        return f"layers/{self.group}/{self.layer.name}/{self.precision}/{self.direction}/{self.policy}"

    def problem(self) -> ConvProblem:
        return layer_problem(self.layer, self.precision, self.direction)


@dataclass(frozen=True)
class IterationUnit:
    """Training steps of a network, within a limit in bytes."""

    network: str
    precision: str
    limit: int

    @property
    def key(self) -> str:
        return f"iterations/{self.network}/{self.precision}/{self.limit}"


@dataclass(frozen=True)
class CostUnit:
    """What mucudnn itself takes of the host's time."""

    key: str = "costs/host"


Unit = LayerUnit | IterationUnit | CostUnit


def turn(unit: Unit) -> int:
    """Which units come first where there is no time for all: those that can be held against mu-cuDNN's own figures.

    These are layers and training steps of AlexNet and ResNet-18 in float32 (Oyama et al. 2018, section V); DeepBench's
    layers follow, then everything else.
    """
    if isinstance(unit, CostUnit):
        return 0
    if unit.precision == "float32" and isinstance(unit, IterationUnit):
        return 2 if unit.network in ("alexnet", "resnet18") else 4
    if unit.precision == "float32" and isinstance(unit, LayerUnit) and unit.policy == "powerOfTwo":
        return 1 if unit.group == "alexnet" else 3
    return 5


def layer_problem(layer: Layer, precision: str, direction: str) -> ConvProblem:
    """A layer as a problem."""
    arm = PRECISIONS[precision]
    return ConvProblem.of_convolution(
        Direction(direction),
        layer.input,
        layer.weight,
        stride=layer.stride,
        padding=layer.padding,
        dilation=layer.dilation,
        groups=layer.groups,
        dtype=arm.dtype,
        formats=(arm.memory_format,) * 3,
    )


def alexnet() -> list[Layer]:
    return convolutions(NETWORKS["alexnet"], 256)


def read_layers(path: Path) -> list[Layer]:
    """The distinct layers of a CSV table with a line of headings: `REQUIRED`, and where wanted `OPTIONAL`.

    Raises:
        LayersError: naming the file, the line and what is accepted.
    """
    try:
        with path.open(newline="") as file:
            reader = csv.DictReader(file)
            headings = reader.fieldnames or []
            wrong = [name for name in REQUIRED if name not in headings]
            unknown = [name for name in headings if name not in (*REQUIRED, *OPTIONAL)]
            if wrong or unknown:
                found = f"lacks {', '.join(wrong)}" if wrong else f"has {', '.join(map(repr, unknown))}"
                accepted = f"accepted headings are {', '.join(REQUIRED)}, and where wanted {', '.join(OPTIONAL)}"
                raise LayersError(f"{path}: the first line {found}: {accepted}")
            layers = [_layer(f"{path}: line {reader.line_num}", row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise LayersError(f"{path}: {reason}") from error
    if not layers:
        raise LayersError(f"{path}: there is no layer in it")
    return list(dict.fromkeys(layers))


def _layer(where: str, row: dict[str, str | None]) -> Layer:
    if None in row or None in row.values():
        raise LayersError(f"{where}: accepted are as many numbers as there are headings")
    numbers = {name: _number(where, name, row[name] or "") for name in row}
    of = {**OPTIONAL, **numbers}
    plain = Layer(
        name="",
        input=(of["batch"], of["in_channels"], of["height"], of["width"]),
        weight=(of["out_channels"], of["in_channels"] // of["groups"], of["kernel_h"], of["kernel_w"]),
        stride=(of["stride_h"], of["stride_w"]),
        padding=(of["pad_h"], of["pad_w"]),
        dilation=(of["dilation_h"], of["dilation_w"]),
        groups=of["groups"],
        transposed=False,
        output_padding=(0, 0),
    )
    try:
        return replace(plain, name=str(layer_problem(plain, "float32", "forward")))
    except ValueError as error:
        raise LayersError(f"{where}: {error}") from error


def _number(where: str, name: str, text: str) -> int:
    least = LEAST.get(name, 1)
    if not text.strip().isdecimal() or int(text) < least:
        raise LayersError(f"{where}: {name}={text!r}: accepted is a number from {least} on")
    return int(text)


def layer_units(
    tables: dict[str, list[Layer]], precisions: list[str], directions: list[str], policies: list[str]
) -> Iterator[LayerUnit]:
    """Every combination; what tells most per second of measuring comes first."""
    for policy in policies:
        for precision in precisions:
            for group, layers in tables.items():
                for layer in layers:
                    for direction in directions:
                        yield LayerUnit(group, layer, precision, direction, policy)
