"""Channel shuffle, and pixel shuffle and unshuffle between channels and space; channels and space sharded."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distconv.rules.operands.sums import settled
from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import coordinate, dim_axes, local_shape, owners
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.needs import Piece, window
from distconv.transfer.tracing import planned


@planned(1024)
def shuffle_plan(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], out: tuple[int, ...], factor: int
) -> tuple[tuple[int, Exchange, int, int], ...]:
    """(dim, exchange of the input, elements to skip of the local result, elements to keep) per sharded dim.

    factor: output rows per input row of a shuffle; negative for an unshuffle. Channels go the other way, by its square.
    """
    sides = []
    for dim in range(len(shape) - 3, len(shape)):
        axes = dim_axes(mesh, placements, dim)
        if not axes:
            continue
        outputs = owners(mesh, axes, out[dim])
        wide, by = (factor > 0, abs(factor)) if dim >= len(shape) - 2 else (factor < 0, factor**2)
        if wide:
            needs = tuple(window((a // by, -(-b // by)) if b > a else (0, 0), shape[dim]) for a, b in outputs)
        else:
            needs = tuple(window((a * by, b * by), shape[dim]) for a, b in outputs)
        start, stop = outputs[coordinate(mesh, axes)]
        which = exchange(mesh, axes, dim, owners(mesh, axes, shape[dim]), needs)
        sides.append((dim, which, start % by if wide else 0, stop - start))
    return tuple(sides)


@rule("aten::pixel_shuffle", "aten::pixel_unshuffle")
def pixel_shuffle(func: Any, x: DTensor, factor: int) -> DTensor:
    """(..., C r^2, H, W) to (..., C, H r, W r), or the reverse. Each is the other's backward."""
    local, (mesh, placements) = settled(func, x)
    shape = tuple(func(torch.empty(x.shape, device="meta"), factor).shape)
    direction = -factor if "unshuffle" in func._schema.name else factor
    sides = shuffle_plan(mesh, placements, tuple(x.shape), shape, direction)
    for _, which, _, _ in sides:
        local = which.fetch(local)
    own_shape = local_shape(mesh, placements, shape)
    if 0 in own_shape:
        return wrap(local.new_empty(own_shape), mesh, placements, shape)
    y = func(local.contiguous(), factor)
    for dim, _, skip, own in sides:
        y = y.narrow(dim, skip, own)
    return wrap(y, mesh, placements, shape)


@planned(1024)
def _channel_exchange(mesh: DeviceMesh, axes: tuple[int, ...], channels: int, groups: int) -> Exchange:
    """Result channel c is channel (c mod groups) * (channels / groups) + c // groups of the input."""
    owned, size = owners(mesh, axes, channels), channels // groups
    needs = tuple(tuple(Piece(1, c % groups * size + c // groups) for c in range(*interval)) for interval in owned)
    return exchange(mesh, axes, 1, owned, needs)


@rule("aten::channel_shuffle", "aten::native_channel_shuffle")
def channel_shuffle(func: Any, x: DTensor, groups: int) -> DTensor:
    """Channels (groups, C / groups) transposed. Its backward is itself with C / groups."""
    local, (mesh, placements) = settled(func, x)
    axes = dim_axes(mesh, placements, 1)
    if not axes:
        y = func(local, groups) if local.numel() else local.clone()
        return wrap(y, mesh, placements, x.shape)
    if groups < 1 or x.shape[1] % groups:
        raise RuntimeError(f"{func}: {x.shape[1]} channels do not divide into {groups} groups")
    return wrap(_channel_exchange(mesh, axes, x.shape[1], groups).fetch(local), mesh, placements, x.shape)
