"""Plan of a convolution of given shapes: which halos and channels it fetches, and how its local calls pad.

A rank's spatial intervals are the same for all samples and channels.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard

from distconv.rules.convolution.edges import Edges, around, edges
from distconv.rules.convolution.kernels import Arguments, goes_to_onednn, is_torchs
from distconv.rules.operands.channel_split import Split, make_split
from distconv.settings.channels import ChannelMap
from distconv.tensors.layouts import box_at, coordinate, local_shape, owners, shard_axes
from distconv.transfer.exchange import Exchange, Exchanges, exchange
from distconv.transfer.needs import Need, Piece, window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import EMPTY, Transposed, Window, intersect, length

LEAST_BYTES = 2**20
"""Bytes of a rank's inputs below which one call for all is faster than several while messages travel."""


@dataclass(frozen=True)
class Margins:
    """The padding of a local backward call, and the zeros before and after the rank's own inputs."""

    padding: int = 0
    before: int = 0
    after: int = 0

    def limited(self, padding: int) -> Margins:
        """These margins with at most so much padding; zeros take the place of the rest."""
        extra = max(0, self.padding - padding)
        return Margins(self.padding - extra, self.before + extra, self.after + extra)


@dataclass(frozen=True)
class Side:
    """One sharded dim of a convolution, as this rank sees it.

    A local call is handed what ``inputs`` (forward) or ``grads`` (backward) fetches. Forward it pads by ``padding``,
    and its result begins ``skip`` before the rank's own ``own`` elements.
    """

    dim: int
    inputs: Exchange
    grads: Exchange
    padding: int
    skip: int
    own: int
    data: Margins
    filter: Margins


@dataclass(frozen=True)
class BackwardCall:
    """A local backward call, of x with zeros around it."""

    padding: list[int]
    zeros: list[int]  # The zeros as `constant_pad_nd` takes them; empty if there are none.
    own: tuple[tuple[int, int], ...]  # (dim, index of the first own input) along each sharded dim.


@dataclass(frozen=True)
class Overlap:
    """One dim whose halos travel while a rank computes with what it owns.

    ``inputs`` and ``grads`` fetch that, the halos before and after it, and no zeros.
    """

    dim: int
    edges: Edges
    inputs: Exchange
    grads: Exchange


@dataclass(frozen=True, eq=False)
class ConvolutionPlan:
    """Everything that a convolution of these shapes on this mesh decides, on this rank; made once for all its calls."""

    layer: ChannelMap
    split: Split  # This rank's block of the weight, and the exchanges of channels that go with it.
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    sides: tuple[Side, ...]
    out_shape: tuple[int, ...]
    out_local: tuple[int, ...]  # The shape of this rank's shard of y.
    padding: list[int]  # Of local forward calls; backward calls pad sharded dims by their sides' margins.
    output_padding: list[int]
    overlap: Overlap | None  # None where all halos are better fetched at once.
    by_channels: bool  # Whether channels and filters are computed piece by piece while others of them travel.
    onednn: bool  # Whether torch hands the whole to oneDNN on a CPU.
    by_torch: bool  # Whether a local forward call is too small for any other function than torch's.
    is_own: bool
    """Whether no other rank computes what this rank does, as some dim is sharded along every axis of the mesh."""

    @functools.cached_property
    def arguments(self) -> tuple[Any, ...]:
        """Stride, padding, dilation, whether it is transposed, and output padding of local forward calls."""
        return self.stride, self.padding, self.dilation, self.layer.transposed, self.output_padding

    @functools.cached_property
    def in_pieces(self) -> bool:
        """Whether what this rank reads arrives piece by piece, without halos: with them each would need messages."""
        return self.by_channels and not self.sides

    @functools.cached_property
    def only_call(self) -> tuple[Any, ...] | None:
        """All arguments of the local forward call, where a single one takes the whole block."""
        runs, every = self.split.block.runs, self.split.block.every
        is_only = len(runs) == 1 and (runs[0].channels, runs[0].filters) == every and 0 not in self.out_local
        return (*self.arguments, runs[0].groups) if is_only else None

    @functools.cached_property
    def backward_calls(self) -> tuple[BackwardCall, BackwardCall]:
        """The calls that give dL/dx and dL/dweight; one object if one call gives both."""
        data = self._backward_call([(side.dim, side.data) for side in self.sides])
        filter = self._backward_call([(side.dim, side.filter) for side in self.sides])
        return data, data if data == filter else filter

    def _backward_call(self, sides: list[tuple[int, Margins]]) -> BackwardCall:
        padding, zeros = list(self.padding), [0] * (2 * (len(self.out_shape) - 2))
        for dim, margin in sides:
            at = 2 * (len(self.out_shape) - 1 - dim)
            padding[dim - 2], zeros[at : at + 2] = margin.padding, (margin.before, margin.after)
        return BackwardCall(padding, zeros if any(zeros) else [], tuple((dim, each.before) for dim, each in sides))

    @functools.cached_property
    def inputs(self) -> Exchanges:
        """Fetches what the block reads of x: its channels, then halos."""
        return Exchanges([self.split.channels, *(side.inputs for side in self.sides)])

    @functools.cached_property
    def grads(self) -> Exchanges:
        """Fetches what backward reads of dL/dy: the block's filters, then halos."""
        return Exchanges([self.split.filters, *(side.grads for side in self.sides)])


@functools.lru_cache(maxsize=4096)
def plan_along(plan: ConvolutionPlan, dim: int, own: int, padding: int, margins: Margins) -> ConvolutionPlan:
    """The plan of local calls that make ``own`` outputs along a sharded dim: so padded forward, and so backward."""
    return replace(
        plan,
        sides=tuple(
            replace(side, own=own, data=margins, filter=margins) if side.dim == dim else side for side in plan.sides
        ),
        out_local=(*plan.out_local[:dim], own, *plan.out_local[dim + 1 :]),
        padding=[*plan.padding[: dim - 2], padding, *plan.padding[dim - 1 :]],
    )


@planned(4096)
def make_convolution_plan(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    current: tuple[Placement, ...],
    algorithm: str,
    dtypes: tuple[torch.dtype | None, ...],
    given: Arguments,
) -> ConvolutionPlan:
    """Checks the arguments as one process would, on the whole shapes, and derives the plan.

    ``shape`` and ``weight`` are those of the whole tensors; the weight's layout is ``current``, and the mesh's channel
    algorithm decides on what it leaves open. ``given``: the operator's other arguments, in tuples.
    """
    axes = shard_axes(mesh, placements, first=2)
    stride, padding, dilation, output_padding = (
        list(values) * (len(shape) - 2 if len(values) == 1 else 1) for values in (*given[:3], given[4])
    )
    transposed, groups = given[3], given[5]
    arguments = stride, padding, dilation, transposed, output_padding, groups
    channels = weight[1] * groups if transposed else weight[0]
    try:
        whole = torch.ops.aten.convolution(
            torch.empty(shape, dtype=dtypes[0], device="meta"),
            torch.empty(weight, dtype=dtypes[1], device="meta"),
            None if dtypes[2] is None else torch.empty(channels, dtype=dtypes[2], device="meta"),
            *arguments,
        )
    except RuntimeError as error:
        what = f"convolution of an input {shape} with a weight {weight}, groups {groups}"
        raise RuntimeError(f"{what}: {error}") from None
    out_shape = tuple(whole.shape)
    local_padding, local_output_padding = list(padding), list(output_padding)
    sides = []
    overlap: Overlap | None = None
    may_overlap = not transposed and overlap_pays(mesh, placements, shape, dtypes[0])
    for dim, along in axes.items():
        at = dim - 2
        kernel = Window(weight[dim], stride[at], padding[at], dilation[at])
        rank = coordinate(mesh, along)
        inputs, outputs = owners(mesh, along, shape[dim]), owners(mesh, along, out_shape[dim])
        # The side of the wide stride: x of a convolution, y of a transposed one.
        fine, coarse = (outputs, inputs) if transposed else (inputs, outputs)
        wide = tuple(window(kernel.inputs(interval), fine[-1][1]) for interval in coarse)
        calls = [kernel.transposed(interval) for interval in fine]
        spans = tuple(_span(call, coarse[-1][1]) for call in calls)
        read_fine = exchange(mesh, along, dim, fine, wide)
        read_coarse = exchange(mesh, along, dim, coarse, spans)
        call, own = calls[rank], length(fine[rank])
        made = (length(call.span) - 1) * kernel.stride + kernel.reach - 2 * call.padding
        if transposed:
            # oneDNN's fast kernels need a padding that strides divide; others take many times the operands' memory.
            cut = call.padding % kernel.stride if mesh.device_type == "cpu" else 0
            side = Side(dim, read_coarse, read_fine, call.padding - cut, call.skip + cut, own, Margins(), Margins())
        else:
            data = Margins(call.padding, call.skip, made - call.skip - own if own else 0)
            # A CPU's kernels for dL/dweight take up to three times as long where the padding exceeds the layer's own.
            back = data.limited(kernel.padding)
            side = Side(dim, read_fine, read_coarse, 0, 0, length(coarse[rank]), data, back)
        local_padding[at], local_output_padding[at] = side.padding, 0
        sides.append(side)
        if overlap is None and may_overlap:
            reads = [intersect(kernel.inputs(interval), (0, shape[dim])) for interval in outputs]
            readers = [intersect(call.need, (0, out_shape[dim])) for call in calls]
            found = edges(kernel, (inputs, outputs), (reads, readers))
            if found is not None and not (read_fine.plan.silent and read_coarse.plan.silent):
                fetched, returned = (
                    exchange(mesh, along, dim, owned, tuple(map(around, owned, needs)))
                    for owned, needs in ((inputs, reads), (outputs, readers))
                )
                overlap = Overlap(dim, found[rank], fetched, returned)
    scale = math.prod(stride) if transposed else 1 / math.prod(stride)
    layer = ChannelMap(shape[1], out_shape[1], groups, transposed, float(scale))
    split = make_split(mesh, placements, layer, current, (), algorithm)
    out_local = local_shape(mesh, placements, out_shape)
    steps, paddings = (tuple(stride), tuple(dilation)), (local_padding, local_output_padding)
    by_channels = groups == 1 and is_large(mesh, placements, shape, dtypes[0])
    onednn = mesh.device_type == "cpu" and goes_to_onednn(shape, weight, dtypes[0], arguments)
    read = [*local_shape(mesh, placements, shape)]
    read[1] = split.channels.plan.extent
    for side in sides:
        read[side.dim] = side.inputs.plan.extent
    assert dtypes[0] is not None, "it is that of x"
    by_torch = is_torchs(onednn, math.prod(read), weight, dtypes[0])
    is_own = all(isinstance(p, Shard) or mesh.size(axis) == 1 for axis, p in enumerate(placements))
    return ConvolutionPlan(
        *(layer, split, *steps, tuple(sides), out_shape, out_local, *paddings, overlap, by_channels, onednn, by_torch),
        is_own,
    )


def overlap_pays(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype | None
) -> bool:
    """Whether to compute edges separately, if they are narrow; the same on all ranks."""
    # A CPU's kernels take up to eight times as long for a few planes by themselves as for as many of a volume.
    return not (mesh.device_type == "cpu" and len(shape) == 5) and is_large(mesh, placements, shape, dtype)


def is_large(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype | None
) -> bool:
    """Whether some rank has inputs large enough for several calls; the same on all ranks."""
    assert dtype is not None, "it is that of x"
    largest = box_at(mesh, placements, shape, [0] * mesh.ndim)
    return math.prod(map(length, largest)) * dtype.itemsize >= LEAST_BYTES


def _span(call: Transposed, extent: int) -> Need:
    """The span that a local transposed convolution reads; zeros where its inputs reach none of the rank's elements."""
    start, stop = call.span
    inside = intersect(call.need, (0, extent))
    if inside == EMPTY:
        return (Piece(stop - start),) if stop > start else ()
    pieces = (Piece(inside[0] - start), Piece(inside[1] - inside[0], inside[0]), Piece(stop - inside[1]))
    return tuple(piece for piece in pieces if piece.length)
