"""Padding: constant, reflect, replicate and circular, on sharded dims, also negative (a crop) and wider than a shard.

Each mode is an index map: which element of the input, or fill, each output position shows. The exchange does the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distconv.rules.operands import part_of
from distconv.rules.registry import above_autograd, rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, find_layout, layout, owners
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.needs import Need, Piece, make_exchange_plan
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval


def index_map(mode: str, extent: int, before: int, after: int) -> Need:
    """The padded dim, as pieces of the unpadded one. Where ``before`` or ``after`` is negative it is cropped."""
    start, stop = max(0, -before), extent - max(0, -after)
    before, after = max(0, before), max(0, after)
    ends = {
        "constant": (Piece(before), Piece(after)),
        "reflect": (Piece(before, before, -1), Piece(after, extent - 2, -1)),
        "replicate": (Piece(before, 0, 0), Piece(after, extent - 1, 0)),
        "circular": (Piece(before, stop - before), Piece(after, start)),
    }
    first, last = ends[mode]
    return tuple(piece for piece in (first, Piece(stop - start, start), last) if piece.length > 0)


def restricted(need: Need, interval: Interval) -> Need:
    """The part of an index map that fills the positions of the interval."""
    result, position = [], 0
    for piece in need:
        start, stop = max(interval[0], position), min(interval[1], position + piece.length)
        if start < stop:
            source = None if piece.start is None else piece.start + piece.step * (start - position)
            result.append(Piece(stop - start, source, piece.step))
        position += piece.length
    return tuple(result)


@planned(4096)
def padding_plan(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], mode: str, pad: tuple[int, ...]
) -> tuple[tuple[Exchange, ...], tuple[int, ...], tuple[int, ...]]:
    """(exchanges of the padded sharded dims, padding left to the local operator, padded shape)."""
    result, local_pad, exchanges = list(shape), list(pad), []
    for index in range(len(pad) // 2):
        dim = len(shape) - 1 - index
        before, after = pad[2 * index], pad[2 * index + 1]
        result[dim] += before + after
        axes = dim_axes(mesh, placements, dim)
        if axes and (before or after):
            need = index_map(mode, shape[dim], before, after)
            needs = tuple(restricted(need, interval) for interval in owners(mesh, axes, result[dim]))
            exchanges.append(exchange(mesh, axes, dim, owners(mesh, axes, shape[dim]), needs))
            local_pad[2 * index] = local_pad[2 * index + 1] = 0
    return tuple(exchanges), tuple(local_pad), tuple(result)


def _check(mode: str, shape: Sequence[int], pad: Sequence[int], value: float) -> None:
    """Raise what one process raises for these arguments."""
    torch.nn.functional.pad(
        torch.empty(tuple(shape), device="meta"), list(pad), mode, value if mode == "constant" else None
    )


@rule("aten::constant_pad_nd")
def constant(func: Any, x: DTensor, pad: list[int], value: float = 0) -> DTensor:
    """Pad (or crop) with a constant. Its backward is itself with the padding negated."""
    mesh, placements = layout(x)
    _check("constant", x.shape, pad, value)
    exchanges, local_pad, shape = padding_plan(mesh, placements, tuple(x.shape), "constant", tuple(pad))
    local = x._local_tensor
    for which in exchanges:
        local = which.fetch(local, value)
    if any(local_pad):
        local = torch.ops.aten.constant_pad_nd.default(local, list(local_pad), value)
    elif local is x._local_tensor:
        local = local.clone()
    return wrap(local, mesh, placements, shape)


@rule(*(f"aten::{mode}_pad{n}d" for mode in ("reflection", "replication") for n in (1, 2, 3)))
def mirror(func: Any, x: DTensor, pad: list[int]) -> DTensor:
    """Reflection and replication padding of the last dims."""
    mesh, placements = layout(x)
    mode = "reflect" if "reflection" in func._schema.name else "replicate"
    _check(mode, x.shape, pad, 0)
    exchanges, local_pad, shape = padding_plan(mesh, placements, tuple(x.shape), mode, tuple(pad))
    local = x._local_tensor
    for which in exchanges:
        local = which.fetch(local)
    if any(local_pad):
        local = func(local, list(local_pad)) if local.numel() else local.new_empty(_padded(local.shape, local_pad))
    return wrap(local, mesh, placements, shape)


@rule(*(f"aten::{mode}_pad{n}d_backward" for mode in ("reflection", "replication") for n in (1, 2, 3)))
def mirror_backward(func: Any, grad: Tensor, x: Tensor, pad: list[int]) -> DTensor:
    """The adjoint: every gradient is added to the element that was shown."""
    mesh, placements = find_layout(x, grad)
    mode = "reflect" if "reflection" in func._schema.name else "replicate"
    exchanges, local_pad, _ = padding_plan(mesh, placements, tuple(x.shape), mode, tuple(pad))
    local, shape = part_of(grad, mesh, placements), list(local_as(x, mesh, placements).shape)
    if any(local_pad):
        before = list(local.shape)
        for index in range(len(local_pad) // 2):
            before[-1 - index] -= local_pad[2 * index] + local_pad[2 * index + 1]
        like = local.new_empty(1).expand(before)
        local = func(local.contiguous(), like, list(local_pad)) if local.numel() else local.new_zeros(before)
    for which in reversed(exchanges):
        local = which.adjoint(local)
    assert list(local.shape) == shape
    return wrap(local, mesh, placements, x.shape)


def _padded(shape: Sequence[int], pad: Sequence[int]) -> list[int]:
    result = list(shape)
    for index in range(len(pad) // 2):
        result[-1 - index] += pad[2 * index] + pad[2 * index + 1]
    return result


@rule("aten::_pad_circular")
def circular(func: Any, x: DTensor, pad: list[int]) -> DTensor:
    """Circular padding: the ends of each padded dim continue at the other end."""
    mesh, placements = layout(x)
    _check("circular", x.shape, pad, 0)
    exchanges, local_pad, shape = padding_plan(mesh, placements, tuple(x.shape), "circular", tuple(pad))
    local = x._local_tensor
    for which in exchanges:
        local = which.fetch(local)
    for whole in _whole_dims(local.shape, local_pad):
        local = whole.fetch(local)
    return wrap(local, mesh, placements, shape)


class Circular(torch.autograd.Function):
    """Circular padding with its adjoint: PyTorch has no such backward operator, it writes slices in place."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, pad: list[int]) -> DTensor:
        ctx.given = tuple(pad), tuple(x.shape), *layout(x)
        return circular(None, x, pad)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[DTensor, None]:
        return _CircularAdjoint.apply(grad, *ctx.given), None


class _CircularAdjoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        grad: Tensor,
        pad: tuple[int, ...],
        shape: tuple[int, ...],
        mesh: DeviceMesh,
        placements: tuple[Placement, ...],
    ) -> DTensor:
        ctx.pad = list(pad)
        exchanges, local_pad, _ = padding_plan(mesh, placements, shape, "circular", pad)
        local = part_of(grad, mesh, placements)
        unpadded = [
            extent - count for extent, count in zip(local.shape, _padded([0] * local.dim(), local_pad), strict=True)
        ]
        for whole in reversed(_whole_dims(unpadded, local_pad)):
            local = whole.adjoint(local)
        for which in reversed(exchanges):
            local = which.adjoint(local)
        return wrap(local, mesh, placements, shape)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[DTensor, None, None, None, None]:
        return Circular.apply(grad, ctx.pad), None, None, None, None


def _whole_dims(shape: Sequence[int], pad: Sequence[int]) -> list[Exchange]:
    """Circular padding of the dims that this rank holds whole: exchanges with nobody."""
    result = []
    for index in range(len(pad) // 2):
        if pad[2 * index] or pad[2 * index + 1]:
            dim = len(shape) - 1 - index
            need = index_map("circular", shape[dim], pad[2 * index], pad[2 * index + 1])
            result.append(Exchange(make_exchange_plan(((0, shape[dim]),), (need,), 0), dim, None, 1))
    return result


# torch makes of it slices that are written in place.
@above_autograd("aten::_pad_circular")
def circular_differentiably(x: DTensor, pad: list[int]) -> DTensor:
    """Circular padding."""
    return Circular.apply(x, pad)
