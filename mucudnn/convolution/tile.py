"""A part of a convolution along the mini-batch or a spatial dim, which is a convolution itself.

Along the mini-batch the parts are micro-batches. Along a spatial dim they are micro-tiles: disjoint intervals of dL/dx
in the backward data pass, of dL/dy (over which the results are summed) for the weight's gradient, and of y forward.
Each tile also reads an interval of the other tensor. These intervals overlap by the reach of the kernel. A tile at an
edge of the tensor has padding where an inner tile has neighbours.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.geometry import Interval, intersect, length
from mucudnn.convolution.problem import ALIGNMENT, ConvProblem, Dim, Role, Shape


@dataclass(frozen=True)
class Tile:
    """The position of a part of a convolution.

    Attributes:
        problem: of the part.
        extent: samples, or rows, that it takes of the division.
        at: the tensor dim of x and y that is divided.
        x, y: the part's intervals along it.
        kept: what providers made ready for the part.
    """

    problem: ConvProblem
    extent: int
    at: int
    x: Interval
    y: Interval
    kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def part(self, whole: Operands) -> Part:
        """The part of a whole's tensors: views of them, but for the weight, which all parts share."""
        at, x, y = self.at, whole.x, whole.y
        (x_start, x_stop), (y_start, y_stop) = self.x, self.y
        if x_stop - x_start != x.shape[at]:
            x = x.narrow(at, x_start, x_stop - x_start)
        if y_stop - y_start != y.shape[at]:
            y = y.narrow(at, y_start, y_stop - y_start)
        return Part(x, whole.w, y, whole.bias, problem=self.problem, kept=self.kept)


@dataclass(slots=True, eq=False)
class Part(Operands):
    """A convolution and its tensors: a micro-batch or a micro-tile of a larger one, or the whole of it.

    Attributes:
        problem: the convolution.
        kept: what a provider made ready for this part; it lives as long as the plan, and serves all its calls.
    """

    problem: ConvProblem = field(kw_only=True)
    kept: dict[Any, Any] = field(kw_only=True)

    @property
    def result(self) -> torch.Tensor:
        """The tensor to be written."""
        tensor: torch.Tensor = getattr(self, self.problem.target)
        return tensor

    def write(self, found: torch.Tensor, accumulate: bool) -> bool:
        """Writes the result, or adds it. Returns whether that of the next part is to be added."""
        if accumulate:
            self.result.add_(found)
        else:
            self.result.copy_(found)
        return self.problem.target is Role.W


def extent(problem: ConvProblem, dim: Dim) -> int:
    """Samples of the mini-batch, or rows of what is divided along space."""
    if dim is Dim.BATCH:
        return problem.extent
    return (problem.x_shape if problem.target is Role.X else problem.y_shape)[2 + problem.spatial_dims.index(dim)]


def is_divisible(problem: ConvProblem, dim: Dim) -> bool:
    """Whether parts can be made along a dim.

    Space is not divided where the padding is as large as the kernel's reach or larger: a tile could then read nothing
    but padding.
    """
    if dim is Dim.BATCH:
        return True
    axis = problem.spatial_dims.index(dim)
    return extent(problem, dim) > 1 and problem.padding[axis] < problem.windows[axis].reach


def divided_dims(problem: ConvProblem) -> tuple[Dim, ...]:
    """The dims along which the problem is divided, the mini-batch first, then the outermost spatial one."""
    return tuple(dim for dim in (Dim.BATCH, problem.spatial_dims[0]) if is_divisible(problem, dim))


def tile(
    problem: ConvProblem, dim: Dim, start: int, size: int, known: dict[tuple[int, ...], ConvProblem] | None = None
) -> Tile:
    """The part [start, start + size) along a dim that `is_divisible`.

    ``known``: problems of other parts along the same dim, to which that of this one is added; most are equal.
    """
    x = y = start, start + size
    at, padding, formats = 0, problem.padding, problem.formats
    if dim is not Dim.BATCH:
        axis = problem.spatial_dims.index(dim)
        at = 2 + axis
        window, inputs, outputs = problem.windows[axis], problem.x_shape[at], problem.y_shape[at]
        if problem.target is Role.X:
            # With a large stride no y may read the tile at all. A part needs some rows of y: it gets those next to it.
            first, last = window.transposed(x).span
            first = min(first, outputs - 1)
            y = intersect((first, max(first + 1, last)), (0, outputs))
        else:
            x = intersect(window.inputs(y), (0, inputs))
        padding = _with(padding, axis, x[0] - window.inputs(y)[0])
    alignment = _alignment(problem, at, x[0], y[0])
    key = length(x), length(y), *padding, alignment
    part = None if known is None else known.get(key)
    if part is None:
        if at:
            x_format, w_format, y_format = formats
            x_format = _format_of_rows(x_format, problem.x_shape, at)
            formats = x_format, w_format, _format_of_rows(y_format, problem.y_shape, at)
        part = replace(
            problem,
            x_shape=_with(problem.x_shape, at, length(x)),
            y_shape=_with(problem.y_shape, at, length(y)),
            padding=padding,
            formats=formats,
            alignment=alignment,
        )
        if known is not None:
            known[key] = part
    return Tile(part, size, at, x, y)


def kinds(problem: ConvProblem, dim: Dim, size: int) -> set[ConvProblem]:
    """The distinct problems of parts of one size.

    Of a mini-batch these are the first part and one at the least aligned place. Along space they are those at the edges
    and, at each phase of the stride, those between them.
    """
    starts, room = {0}, extent(problem, dim) - size
    if dim is Dim.BATCH:
        starts |= {size} if room else set()
    else:
        starts |= {room, *range(room // 2, min(room, room // 2 + problem.stride[problem.spatial_dims.index(dim)]))}
    return {tile(problem, dim, start, size).problem for start in starts}


def _with(values: Shape, index: int, value: int) -> Shape:
    return (*values[:index], value, *values[index + 1 :])


def tiles(problem: ConvProblem, dim: Dim, sizes: Sequence[int], start: int = 0) -> Iterator[Tile]:
    """Consecutive parts along a dim."""
    known: dict[tuple[int, ...], ConvProblem] = {}
    for size in sizes:
        yield tile(problem, dim, start, size, known)
        start += size


def problems(problem: ConvProblem, dim: Dim, sizes: Sequence[int]) -> Counter[ConvProblem]:
    """The distinct problems of consecutive parts of one size but for the last, and how many parts are of each.

    Only parts that may differ are made. Away from the edges of the tensor they repeat: parts whose starts differ
    by a multiple of the stride and of the alignment are equal.
    """
    size, count, whole = sizes[0], len(sizes), extent(problem, dim)
    axis = problem.spatial_dims.index(dim)
    stride, edge = problem.stride[axis], problem.windows[axis].reach + problem.stride[axis]
    rows = (math.prod(shape[3 + axis :]) * problem.element_bytes for shape in (problem.x_shape, problem.y_shape))
    period = stride * ALIGNMENT // math.gcd(ALIGNMENT, *rows)
    period //= math.gcd(period, size)
    first, end = -(-edge // size), (whole - edge) // size
    repeated = range(first, min(first + period, end))
    single = (*range(first), *range(end, count)) if repeated else range(count)

    def problem_of(index: int) -> ConvProblem:
        return tile(problem, dim, index * size, sizes[index], known).problem

    known: dict[tuple[int, ...], ConvProblem] = {}
    found = Counter(map(problem_of, single))
    for index in repeated:
        found[problem_of(index)] += len(range(index, end, period))
    return found


def _alignment(whole: ConvProblem, at: int, x: int, y: int) -> int:
    """The alignment of a part that begins `x` and `y` elements further along the divided dim.

    Tensors of format "strided" are left out: algorithms that need an alignment copy them.
    """
    offsets = ALIGNMENT
    for start, shape, name in ((x, whole.x_shape, whole.formats[0]), (y, whole.y_shape, whole.formats[2])):
        if name != "strided":
            inner = shape[at + 1 :] if name == "contiguous" or at == 0 else (shape[1], *shape[at + 1 :])
            offsets |= start * math.prod(inner) * whole.element_bytes
    return min(whole.alignment, offsets & -offsets)


def _format_of_rows(name: str, shape: Shape, at: int) -> str:
    """The memory format of some rows of a tensor: its own if the rows are contiguous in memory, else "strided"."""
    inner = range(2, at)
    outside = {"contiguous": shape[0] * shape[1], "channels_last": shape[0]}.get(name)
    if outside is not None:
        outside *= math.prod(shape[dim] for dim in inner)
    return name if outside == 1 else "strided"
