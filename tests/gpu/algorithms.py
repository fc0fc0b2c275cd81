"""Algorithms on a device, problem by problem; which problems, and how exact each algorithm has to be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction, Role
from mucudnn.convolution.tile import divided_dims, extent, tiles
from mucudnn.planning.planner import Planner
from mucudnn.providers import Provider
from mucudnn.providers.cudnn.backend import NumericalNote
from mucudnn.providers.cudnn.card import Card
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.form import form
from mucudnn.providers.cudnn.graph import Configuration, OperationGraph
from mucudnn.settings import MEMORY, Settings
from mucudnn.timing.store import Store


@dataclass(frozen=True)
class Arm:
    """A type, a memory format and a bound.

    Attributes:
        tolerance: on |found - exact| / |exact| in the 2-norm, exact being float64's on the same, already rounded,
            operands. A few roundings of results for float64 and the half types, whose products are summed in a wider
            type; for TF32 that of the operands to 11 bits; for float32 what the Winograd and Fourier kernels lose.
    """

    dtype: str
    memory_format: str
    tolerance: float
    tf32: bool = False


ARMS = {
    "float64": Arm("float64", "contiguous", 1e-12),
    "float32": Arm("float32", "contiguous", 1e-5),
    "float32 channels_last": Arm("float32", "channels_last", 1e-5),
    "tf32": Arm("float32", "contiguous", 2e-3, tf32=True),
    "float16": Arm("float16", "contiguous", 2e-3),
    "float16 channels_last": Arm("float16", "channels_last", 2e-3),
    "bfloat16 channels_last": Arm("bfloat16", "channels_last", 8e-3),
}


@contextmanager
def precision(arm: Arm) -> Iterator[None]:
    """Torch's switch for TF32."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32" if arm.tf32 else "ieee"
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


GEOMETRIES: dict[str, dict] = {
    "3x3": {"input_shape": (8, 16, 14, 14), "weight_shape": (24, 16, 3, 3), "padding": (1, 1)},
    "5x5, odd channels": {"input_shape": (8, 5, 15, 13), "weight_shape": (7, 5, 5, 5), "padding": (2, 2)},
    "1x1": {"input_shape": (8, 12, 9, 9), "weight_shape": (8, 12, 1, 1)},
    "11x11, strided": {
        "input_shape": (8, 3, 35, 35),
        "weight_shape": (8, 3, 11, 11),
        "stride": (4, 4),
        "padding": (2, 2),
    },
    "strided unevenly": {
        "input_shape": (8, 8, 17, 16),
        "weight_shape": (8, 8, 3, 3),
        "stride": (2, 3),
        "padding": (1, 0),
    },
    "dilated": {"input_shape": (8, 8, 16, 17), "weight_shape": (8, 8, 3, 3), "dilation": (2, 3), "padding": (2, 3)},
    "even kernel": {"input_shape": (8, 8, 12, 12), "weight_shape": (8, 8, 4, 2), "padding": (1, 0)},
    "grouped": {"input_shape": (8, 16, 12, 12), "weight_shape": (32, 4, 3, 3), "groups": 4, "padding": (1, 1)},
    "depthwise": {"input_shape": (8, 16, 12, 12), "weight_shape": (16, 1, 3, 3), "groups": 16, "padding": (1, 1)},
    "transposed": {
        **{"input_shape": (8, 8, 9, 9), "weight_shape": (8, 12, 3, 3), "stride": (2, 2), "padding": (1, 1)},
        **{"output_padding": (1, 1), "transposed": True},
    },
    "1-D": {"input_shape": (8, 8, 64), "weight_shape": (16, 8, 7), "padding": (3,)},
    "1-D, dilated": {"input_shape": (8, 8, 64), "weight_shape": (8, 4, 3), "dilation": (5,), "groups": 2},
    "3-D": {"input_shape": (8, 4, 8, 9, 10), "weight_shape": (8, 4, 3, 3, 3), "padding": (1, 1, 1)},
    "3-D, strided and grouped": {
        **{"input_shape": (8, 8, 9, 9, 9), "weight_shape": (8, 4, 3, 3, 3), "stride": (2, 2, 2)},
        **{"groups": 2, "padding": (1, 1, 1)},
    },
}


def cases(whole: bool) -> list[tuple[str, Direction, str]]:
    """Geometries, directions and arms: every combination, or a sample with every pair of geometry and direction, and
    every arm as often as the others.
    """
    pairs = [(geometry, direction) for geometry in GEOMETRIES for direction in Direction]
    names = list(ARMS)
    if whole:
        return [(geometry, direction, arm) for geometry, direction in pairs for arm in names]
    return [(*pair, names[number % len(names)]) for number, pair in enumerate(pairs)]


WINOGRAD_IN_HALF = 2e-2
"""The bound for Winograd's kernels on half types: they transform what they read, in that type, before they multiply,
and an element of a 6x6 tile is a sum of up to 36 others with weights up to 25. Which tile is cuDNN's choice."""


def tolerance(provider: Provider, algorithm: str, problem: ConvProblem, arm: Arm, device: torch.device) -> float:
    """The bound on an algorithm's relative error."""
    if problem.is_half and _is_winograd(provider, algorithm, problem, device):
        return WINOGRAD_IN_HALF
    return arm.tolerance


def _is_winograd(provider: Provider, algorithm: str, problem: ConvProblem, device: torch.device) -> bool:
    if not isinstance(provider, Engines):
        return "winograd" in algorithm
    put = form(problem)
    assert put is not None, "the engine served it"
    card = Card(device.index or 0)
    with card.planning() as here:
        graph = OperationGraph(card.library, here, put, accumulate=False)
        notes = graph.engine(Configuration.parsed(algorithm).engine).notes
    return not notes.isdisjoint(
        {
            NumericalNote.WINOGRAD,
            NumericalNote.WINOGRAD_TILE_4x4,
            NumericalNote.WINOGRAD_TILE_6x6,
            NumericalNote.WINOGRAD_TILE_13x13,
        }
    )


def problem_of(geometry: str, direction: Direction, arm: Arm) -> ConvProblem:
    """A problem of the table; 3-D tensors have no channels_last format."""
    given = {**GEOMETRIES[geometry]}
    input_shape, weight_shape = given.pop("input_shape"), given.pop("weight_shape")
    dims = len(input_shape) - 2
    plain = {"stride": (1,) * dims, "padding": (0,) * dims, "dilation": (1,) * dims}
    memory_format = "contiguous" if dims == 1 else arm.memory_format
    return ConvProblem.of_convolution(
        direction, input_shape, weight_shape, **{**plain, **given}, dtype=arm.dtype, formats=(memory_format,) * 3
    )


def on_device(problem: ConvProblem, given: Operands, device: torch.device) -> Operands:
    """Copies of the operands in the problem's memory formats; the target is poisoned."""
    memory_formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    made = {}
    for role, name in zip(Role, problem.formats, strict=True):
        tensor = getattr(given, role).to(device, copy=True)
        if name == "channels_last":
            tensor = tensor.contiguous(memory_format=memory_formats[tensor.dim()])
        made[str(role)] = tensor.fill_(math.nan) if role is problem.target else tensor
    return replace(given, **made, bias=None if given.bias is None else given.bias.to(device))


def providers(problem: ConvProblem, device: torch.device) -> dict[str, Provider]:
    """Who serves the problem on the device, by algorithm."""
    return Planner(Settings.from_environment({}, database=MEMORY), Store(MEMORY), device=device).offers.providers(
        problem
    )


def launch(
    provider: Provider,
    problem: ConvProblem,
    algorithm: str,
    whole: Operands,
    extents: Sequence[int],
    dim: Dim = Dim.BATCH,
    accumulate: bool = False,
) -> bool:
    """Runs the algorithm on parts along a dim if it serves them all."""
    parts = [tile.part(whole) for tile in tiles(problem, dim, extents)]
    if not all(provider.serves(part.problem, algorithm) for part in parts):
        return False
    provider.launch(algorithm, parts, accumulate)
    return True


def divisions(problem: ConvProblem) -> list[tuple[Dim, tuple[int, ...]]]:
    """The whole, micro-batches that start at odd samples, and micro-tiles."""
    n = problem.extent
    found: list[tuple[Dim, tuple[int, ...]]] = [(Dim.BATCH, (n,))]
    if n > 1:
        found.append((Dim.BATCH, (n - n // 3, n // 3) if n > 2 else (1, 1)))
    for dim in divided_dims(problem)[1:]:
        rows = extent(problem, dim)
        found.append((dim, (rows - rows // 2, rows // 2)))
    return found
