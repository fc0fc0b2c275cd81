"""Padding: constant, reflect, replicate and circular, on sharded dims, also negative (a crop) and wider than a shard.

Each mode is an index map: which element of the input, or fill, each output position shows. The exchange does the rest.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from distconv.rules.operands.own_parts import as_own_part, carried, wrapped
from distconv.rules.registry import above_autograd, rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import added_up, dim_axes, layout_of, owners
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.needs import Need, Piece
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


class PaddingPlan(NamedTuple):
    """How a rank pads its part."""

    exchanges: tuple[Exchange, ...]  # The exchanges of the padded sharded dims.
    local_pad: tuple[int, ...]  # Padding left to the local operator.
    shape: tuple[int, ...]  # The shape of the whole padded tensor.


@planned(4096)
def padding_plan(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], mode: str, pad: tuple[int, ...]
) -> PaddingPlan:
    """The plan of padding a tensor of global ``shape``.

    Torch has no local operator of circular padding with a gradient: exchanges do it for whole dims too, without
    messages.
    """
    result, local_pad, exchanges = list(shape), list(pad), []
    for index in range(len(pad) // 2):
        dim = len(shape) - 1 - index
        before, after = pad[2 * index], pad[2 * index + 1]
        result[dim] += before + after
        axes = dim_axes(mesh, placements, dim)
        if (axes or mode == "circular") and (before or after):
            need = index_map(mode, shape[dim], before, after)
            needs = tuple(restricted(need, interval) for interval in owners(mesh, axes, result[dim]))
            exchanges.append(exchange(mesh, axes, dim, owners(mesh, axes, shape[dim]), needs))
            local_pad[2 * index] = local_pad[2 * index + 1] = 0
    return PaddingPlan(tuple(exchanges), tuple(local_pad), tuple(result))


def padded(local: Tensor, plan: PaddingPlan, mode: str) -> Tensor:
    """This rank's part of the padded tensor, in memory of its own. Differentiable. Constant padding is with zeros."""
    is_saved = mode not in ("reflect", "replicate") or (any(plan.local_pad) and local.numel() > 0)
    made = local if is_saved else _saving(local)
    if any(plan.local_pad):  # whatever it is that a shard without elements shows
        made = torch.nn.functional.pad(made, plan.local_pad, mode if made.numel() else "constant")
    for which in plan.exchanges:
        made = carried(made, which)
    # Inference tensors do not know whether they are views.
    shares = made._base is not None or made.untyped_storage() is local.untyped_storage()
    return made.clone() if shares else made


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        _ = ctx.saved_tensors  # which a checkpoint computes now
        return grad


def _saving(x: Tensor) -> Tensor:
    """x, with a tensor that is saved for backward where hooks see that: torch's operator saves its input.

    A checkpoint computes its function again if a tensor is read that was saved in it, and up to the last of them. So
    what else the function does, such as appending to a list, depends on what is saved.
    """
    is_seen = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return _Saving.apply(x) if is_seen and x.requires_grad else x


def check_padding(mode: str, shape: Sequence[int], pad: Sequence[int], value: float) -> None:
    """Raise what one process raises for these arguments."""
    torch.nn.functional.pad(
        torch.empty(tuple(shape), device="meta"), list(pad), mode, value if mode == "constant" else None
    )


@rule("aten::constant_pad_nd")
def pad_constant(func: Any, x: DTensor, pad: list[int], value: float = 0) -> DTensor:
    """Pad (or crop) with a constant. Its backward is itself with the padding negated."""
    mesh, placements = layout_of(x)
    check_padding("constant", x.shape, pad, value)
    exchanges, local_pad, shape = padding_plan(mesh, placements, tuple(x.shape), "constant", tuple(pad))
    local = x._local_tensor
    for which in exchanges:
        local = which.fetch(local, value)
    if any(local_pad):
        local = torch.ops.aten.constant_pad_nd.default(local, list(local_pad), value)
    elif local is x._local_tensor:
        local = local.clone()
    return wrap(local, mesh, placements, shape)


MODES = {
    **{f"reflection_pad{n}d": "reflect" for n in (1, 2, 3)},
    **{f"replication_pad{n}d": "replicate" for n in (1, 2, 3)},
    "_pad_circular": "circular",
}
"""By operator of torch."""


def _of_last_dims(mode: str, x: DTensor, pad: list[int]) -> Tensor:
    """Padding of the last dims with elements of x."""
    check_padding(mode, x.shape, pad, 0)
    mesh, placements = x.device_mesh, added_up(x.placements)
    plan = padding_plan(mesh, placements, tuple(x.shape), mode, tuple(pad))
    return wrapped(padded(as_own_part(x, mesh, placements), plan, mode), mesh, placements, plan.shape)


for _name, _mode in MODES.items():
    above_autograd(f"aten::{_name}")(functools.partial(_of_last_dims, _mode))
