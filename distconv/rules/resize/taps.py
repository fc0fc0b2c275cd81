"""Interpolation along one dim as a table of taps: which elements a result reads, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distconv.tensors.dtensors import memory_format
from mucudnn.convolution.geometry import EMPTY, Interval


@dataclass(frozen=True, eq=False)
class Taps:
    """Result r of a dim is the sum over k of weight[k, r] times the element at index[k, r]; weight 0 is padding."""

    index: NDArray[np.int64]
    weight: NDArray[np.float64]

    def transposed(self, extent: int) -> Taps:
        """From results to elements: the adjoint."""
        taps, results = self.index.shape
        used = self.weight.ravel() != 0
        element = self.index.ravel()[used]
        result = np.tile(np.arange(results), taps)[used]
        weight = self.weight.ravel()[used]
        order = np.argsort(element, kind="stable")
        element, result, weight = element[order], result[order], weight[order]
        counts = np.bincount(element, minlength=extent)
        position = np.arange(len(element)) - np.repeat(np.cumsum(counts) - counts, counts)
        width = int(counts.max(initial=1))
        index, weights = np.zeros((width, extent), np.int64), np.zeros((width, extent))
        index[position, element], weights[position, element] = result, weight
        return Taps(index, weights)

    def span(self, results: Interval) -> Interval:
        """The elements that some of the results read."""
        part = slice(*results)
        read = self.index[:, part][self.weight[:, part] != 0]
        return (int(read.min()), int(read.max()) + 1) if read.size else EMPTY

    def part(self, results: Interval, start: int) -> Taps:
        """The taps of some results, with positions counted from ``start``."""
        index, weight = self.index[:, slice(*results)], self.weight[:, slice(*results)]
        return Taps(np.where(weight != 0, index - start, 0), weight)

    def equals(self, other: Taps) -> bool:
        """Whether both tables are the same."""
        return np.array_equal(self.index, other.index) and np.array_equal(self.weight, other.weight)

    @property
    def selects(self) -> bool:
        """Every result is one element."""
        return self.weight.shape[0] == 1 and bool((self.weight == 1).all())


def linear_taps(
    extent: int, outputs: int, scale: float | None, align_corners: bool, cubic: bool, dtype: torch.dtype
) -> Taps:
    """The taps of linear and cubic resizing, as in ATen (area_pixel_compute_source_index): in float32, or float64."""
    real: Any = np.float64 if dtype == torch.float64 else np.float32
    if extent == outputs and not cubic:
        scale = None  # ATen's host kernels copy such a dim, whatever the scale.
    if align_corners:
        step = real(extent - 1) / real(outputs - 1) if outputs > 1 else real(0)
    else:
        step = real(1.0 / scale) if scale is not None and scale > 0 else real(extent) / real(outputs)
    output = np.arange(outputs).astype(real)
    half = real(0.5)
    source = step * output if align_corners else step * (output + half) - half
    if not cubic:
        source = np.maximum(source, real(0))
    first = np.minimum(np.floor(source).astype(np.int64), extent - 1)
    after = np.clip(source - first.astype(real), real(0), real(1))
    if not cubic:
        second = np.minimum(first + 1, extent - 1)
        return Taps(np.stack([first, second]), np.stack([real(1) - after, after]).astype(np.float64))
    index = np.clip(np.stack([first + offset for offset in (-1, 0, 1, 2)]), 0, extent - 1)
    weights = [_far(after + 1), _near(after), _near(1 - after), _far(2 - after)]
    return Taps(index, np.stack(weights).astype(np.float64))


_A = -0.75  # The free parameter of cubic convolution (Keys, 1981, equation 4 with ATen's choice).


def _near(x: NDArray[Any]) -> NDArray[Any]:
    return ((_A + 2) * x - (_A + 3)) * x * x + 1


def _far(x: NDArray[Any]) -> NDArray[Any]:
    return ((_A * x - 5 * _A) * x + 8 * _A) * x - 4 * _A


_COLUMNS = 1024  # The number of inputs whose weights are read at once.


def antialiased_taps(
    name: str, at: int, extent: int, outputs: int, scale: float | None, align_corners: bool, like: Tensor
) -> Taps:
    """Read off the stock operator: what each input alone, the others zero, gives every output.

    name: of the forward operator. at: the spatial dim. like: of the dtype and device.
    """
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    # The other dim has two elements: of maps one element wide torch's kernel repeats the first row.
    sizes: list[int] = [2, 2]
    scales: list[float | None] = [None, None]
    sizes[at], scales[at] = outputs, scale
    columns = []
    for start in range(0, extent, _COLUMNS):
        count = min(_COLUMNS, extent - start)
        units = torch.zeros(count, extent, 2, dtype=dtype, device=like.device)
        units.diagonal(start).fill_(1)
        units = units.movedim(1, 1 + at)[None].contiguous()
        made = getattr(torch.ops.aten, name).default(units, sizes, align_corners, *scales)
        columns.append(made.select(3 - at, 0).reshape(count, outputs).cpu().double())
    weight = torch.cat(columns).numpy() if columns else np.zeros((0, outputs))
    taps = max(1, int((weight != 0).sum(0).max(initial=0)))
    index = np.argsort(weight == 0, axis=0, kind="stable")[:taps]
    return Taps(index.astype(np.int64), np.take_along_axis(weight, index, 0))


def nearest_taps(
    name: str, at: int, extent: int, outputs: int, scale: float | None, like: Tensor, backward: bool
) -> Taps:
    """Read off the stock operator, whose rounding depends on dtype, memory format and direction.

    name: of the forward operator. at: the spatial dim. like: of the dtype, device and memory format. ``backward`` reads
    off the backward operator instead: the table of the forward pass whose adjoint it is.
    """
    spatial = int(name[-2])
    sizes, shape = [1] * spatial, [1, 4, *[1] * spatial]
    scales: list[float | None] = [None] * spatial
    ramp_shape = [extent if dim == at else 1 for dim in range(spatial)]
    scales[at], sizes[at] = scale, outputs
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    kept = memory_format(like)
    if backward:
        ones = torch.ones([1, 4, *sizes], dtype=dtype, device=like.device).contiguous(memory_format=kept)
        counts = getattr(torch.ops.aten, f"{name}_backward").default(ones, sizes, [1, 4, *ramp_shape], *scales)
        found = torch.repeat_interleave(torch.arange(extent), counts[0, 0].flatten().round().long().cpu())
    else:
        shape[2 + at] = extent
        ramp = torch.arange(extent, dtype=dtype, device=like.device).view([1, 1, *ramp_shape]).expand(shape)
        ramp = ramp.contiguous(memory_format=kept)
        found = getattr(torch.ops.aten, name).default(ramp, sizes, *scales)[0, 0].flatten().long().cpu()
    index = found.numpy()[None]
    return Taps(index, np.ones(index.shape))
