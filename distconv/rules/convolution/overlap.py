"""Overlap: a rank computes with what it owns while the halos of one dim travel; what needs them is computed last."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from distconv.rules.convolution.edges import Edge
from distconv.rules.convolution.local import LocalConvolution
from distconv.rules.convolution.plan import Margins, Overlap, plan_along
from distconv.transfer.exchange import Exchange
from distconv.transfer.route import part
from mucudnn.convolution.geometry import length


def forward(local: LocalConvolution, overlap: Overlap, x: Tensor, bias: Tensor | None) -> Tensor:
    """This rank's y. Its own x gives all of it but the edges, which are computed anew from both x and halo."""
    for side in local.plan.sides:
        x = x if side.dim == overlap.dim else side.inputs.fetch(x)
    dim, (channels, filters) = overlap.dim, local.plan.split.block.every
    own, halos = _in_turn(overlap.inputs, x)
    y = _of_own(local, overlap).forward(own, bias, channels, filters)
    for at_end, halo in halos:
        edge = overlap.edges.forward[at_end]
        assert edge is not None, "a halo is received where outputs read it"
        rows = part(own, dim, edge.rows)
        wide = torch.cat([rows, halo] if at_end else [halo, rows], dim)
        part(y, dim, edge.outputs).copy_(_at(local, dim, edge).forward(wide, bias, channels, filters))
    return y


def backward(
    local: LocalConvolution, overlap: Overlap, grad: Tensor, x: Tensor, for_data: bool, for_filter: bool
) -> tuple[Tensor | None, Tensor | None]:
    """This rank's dL/dx and share of dL/dweight: what its own dL/dy gives, to which that of the halos is added."""
    for side in local.plan.sides:
        grad = grad if side.dim == overlap.dim else side.grads.fetch(grad)
    dim, (channels, filters) = overlap.dim, local.plan.split.block.every
    own, halos = _in_turn(overlap.grads, grad)
    dx, dw = _of_own(local, overlap).backward(own, x, channels, filters, for_data, for_filter)
    for at_end, halo in halos:
        edge = overlap.edges.backward[at_end]
        assert edge is not None, "a halo is received where inputs reach it"
        rows = part(x, dim, edge.rows)
        more, dw_more = _at(local, dim, edge).backward(halo, rows, channels, filters, for_data, for_filter)
        if dx is not None and more is not None:
            part(dx, dim, edge.rows).add_(more)
        if dw is not None and dw_more is not None:
            dw.add_(dw_more)
    return dx, dw


def _in_turn(which: Exchange, own: Tensor) -> tuple[Tensor, Iterator[tuple[bool, Tensor]]]:
    """The rank's own part, while the halos travel, then each halo; each with whether it is at the end."""
    pieces = which.fetch_in_turn(own)
    _, first = next(pieces)
    return first, ((start > 0, halo) for (start, _), halo in pieces)


def _of_own(local: LocalConvolution, overlap: Overlap) -> LocalConvolution:
    own, padding = local.plan.out_local[overlap.dim], overlap.edges.padding
    return LocalConvolution(plan_along(local.plan, overlap.dim, own, padding, Margins(padding)), local.weight)


def _at(local: LocalConvolution, dim: int, edge: Edge) -> LocalConvolution:
    margins = Margins(0, edge.before, edge.after)
    return LocalConvolution(plan_along(local.plan, dim, length(edge.outputs), 0, margins), local.weight)
