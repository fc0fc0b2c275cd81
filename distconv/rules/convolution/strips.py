"""Convolutions in strips, where torch's kernel of a CPU would write out the operands of all products at once (im2col).

Torch has such kernels for float64, and for some small samples. For a kernel of 3x3x3 elements they write out 27 copies
of the inputs, more than all else that a layer needs. In strips of some rows they write out those of one strip at a
time, which stay in the caches of the processor: that takes from a third of the time to all of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from distconv.transfer.tracing import planned
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import DTYPE_BYTES, ConvProblem, Dim, Direction, Shape
from mucudnn.convolution.tile import extent, is_divisible, tile
from mucudnn.providers.stock import STOCK, Stock, columns_bytes, evened, torchs_backend
from mucudnn.providers.strips import Strips

STRIP = 1 << 22  # Bytes of operands that are written out at once, unless a single row has more.

LEAST = 4 * STRIP  # Bytes of written out operands below which a convolution is left to torch.

_WRITING_OUT = "Slow2d", "Slow3d"  # Torch's kernels that write out the operands of all samples.


def rows_of_strips(x: Sequence[int], w: Sequence[int], dtype: torch.dtype, arguments: Any) -> tuple[Dim, int] | None:
    """Which dim of a convolution of these shapes is cut, and the rows of a strip; None where torch computes it at once.

    ``arguments``: those of `aten::convolution`, with tuples.
    """
    least = math.prod(x) * math.prod(w[1:]) * dtype.itemsize  # without padding, strides and groups
    if least < LEAST or len(x) < 4 or arguments[3] or math.prod(w[2:]) == 1:
        return None
    return _rows(tuple(x), tuple(w), dtype, arguments, torch.get_num_threads())


@planned(4096)
def _rows(x: Shape, w: Shape, dtype: torch.dtype, arguments: Any, _: int) -> tuple[Dim, int] | None:
    """By the number of threads, too, which torch's choice of a kernel may depend on."""
    problem = problem_of(Direction.FORWARD, x, w, arguments, dtype)
    if problem is None:
        return None
    written = problem.extent * math.prod(w[1:]) * math.prod(problem.y_shape[2:]) * dtype.itemsize
    dims = [dim for dim in problem.spatial_dims[:-1] if is_divisible(problem, dim)]
    if not dims or written < LEAST or torchs_backend(problem) not in _WRITING_OUT:
        return None
    along = max(dims, key=lambda dim: extent(problem, dim))
    return along, max(1, extent(problem, along) * STRIP // written)


@functools.lru_cache(maxsize=4096)
def problem_of(
    direction: Direction, x: Shape, w: Shape, arguments: Any, dtype: torch.dtype = torch.float32
) -> ConvProblem | None:
    """The problem of a convolution with these arguments of `aten::convolution`, in tuples, that is not transposed.

    None for a dtype that mucudnn does not know, and for shapes of no convolution: torch says why.
    """
    stride, padding, dilation, _, _, groups = arguments
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        return None
    rest: Any = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "dtype": name}
    try:
        return ConvProblem.of_convolution(direction, x, w, **rest)
    except ValueError:
        return None


def in_strips(x: Tensor, w: Tensor, bias: Tensor | None, arguments: Any, rows: tuple[Dim, int]) -> Tensor:
    """y, computed in the strips that `rows_of_strips` gives."""
    stride, padding, dilation, _, _, groups = arguments
    return torch.ops.distconv.convolution_in_strips(x, w, bias, stride, padding, dilation, groups, *rows)


_library = torch.library.Library("distconv", "FRAGMENT")
_library.define(
    "convolution_in_strips(Tensor x, Tensor w, Tensor? bias, int[] stride, int[] padding, int[] dilation,"
    " int groups, str along, int rows) -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)


def _strips(x: Shape, w: Shape, dtype: torch.dtype, arguments: Any) -> tuple[ConvProblem, Strips]:
    *sizes, groups, along, rows = arguments
    problem = problem_of(Direction.FORWARD, x, w, (*map(tuple, sizes), False, (), groups), dtype)
    assert problem is not None, "it was one when it was decided on"
    return problem, Strips(Stock(), STOCK, Dim(along), rows)


def _computed(x: Tensor, w: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    problem, strips = _strips(tuple(x.shape), tuple(w.shape), x.dtype, arguments)
    y = x.new_empty(problem.y_shape)
    whole = tile(problem, Dim.BATCH, 0, problem.extent)
    strips.launch(strips.name, [whole.part(Operands(x, w, y, bias))], accumulate=False)
    return y


def bytes_of_strips(x: Tensor, w: Tensor, _: Tensor | None, *arguments: Any) -> int:
    """The bytes that `convolution_in_strips` allocates for these arguments besides its tensors."""
    problem, strips = _strips(tuple(x.shape), tuple(w.shape), x.dtype, arguments)
    columns = (columns_bytes(evened(strip).problem) for strip in strips.problems(problem))
    return strips.workspace(problem, strips.name) + max(columns)


def _shape_only(x: Tensor, w: Tensor, bias: Tensor | None, *arguments: Any) -> Tensor:
    stride, padding, dilation, groups, _, _ = arguments
    return torch.convolution(x, w, bias, stride, padding, dilation, False, [0] * (x.dim() - 2), groups)


_library.impl("convolution_in_strips", _computed, "CPU")
torch.library.register_fake("distconv::convolution_in_strips", _shape_only, lib=_library)


@register_flop_formula(torch.ops.distconv.convolution_in_strips)
def _flops(x: Any, w: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return 2 * math.prod(out_shape) * math.prod(w[1:])
