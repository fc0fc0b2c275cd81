"""Attention of this rank's queries to keys of other ranks: blocks of keys arrive in turn, and their results are joined.

No rank ever has all keys, nor all scores of its queries. Block s of a rank belongs to the rank s places further along.
It is received directly from its owner, so that each element is sent once, and its gradient goes directly back. A block
to which no query of a rank attends is not sent. Backward fetches the keys and values once more.

A rank computes a tile of scores at a time (`attend`). The result for some keys is kept with the logarithm of the sum of
its exponentials. From these, results for different keys are combined exactly (Milakov and Gimelshein, "Online
normalizer calculation for softmax", arXiv 1805.02867; Rabe and Staats, "Self-attention does not need O(n^2) memory",
arXiv 2112.05682). Backward recomputes the weights of a tile from that logarithm.

Shapes: queries (..., heads, L, E), keys (..., groups, S, E), values (..., groups, S, Ev), a bias or a mask that
broadcasts to the scores (..., heads, L, S). `attend` and `attend_backward` take plain tensors, and send none.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from distconv.rules.operands.sums import all_reduce, precise
from distconv.tensors.layouts import coordinate
from distconv.transfer.collectives import MAX
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.needs import Need, window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import EMPTY, Interval, length


@dataclass(frozen=True)
class Blockwise:
    """The work of one rank: how it scores its rows, the blocks of keys that it receives, ranks with equal queries."""

    scale: float
    causal: bool
    rows: Interval
    turns: tuple[Turn, ...]
    mesh: DeviceMesh
    combined: tuple[int, ...]  # The axes along which ranks have the same queries and other keys.

    def scores(self, q: Tensor, k: Tensor, mask: Tensor | None, own: Interval, columns: Interval) -> Tensor:
        """The scores of queries ``own``, counted among the rank's, and of the keys at ``columns`` of all.

        Scaled, masked, and causal by positions in the whole tensors. ``mask``: for the rank's queries and all keys.
        """
        scores = torch.matmul(q, k.transpose(-2, -1)) * self.scale
        if mask is not None:
            mask = _of_tile(mask, own, columns)
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        if self.causal:
            below = torch.arange(*columns, device=q.device) <= torch.arange(
                self.rows[0] + own[0], self.rows[0] + own[1], device=q.device
            ).unsqueeze(-1)
            scores = scores.masked_fill(~below, -math.inf)
        return scores


def _of_tile(mask: Tensor, own: Interval, columns: Interval) -> Tensor:
    """The part of a mask for a tile."""
    mask = mask if mask.dim() < 2 or mask.shape[-2] == 1 else mask[..., slice(*own), :]
    return mask if mask.shape[-1] == 1 else mask[..., slice(*columns)]


class BlockwiseAttention(torch.autograd.Function):
    """The result of plain q (..., heads, L, E), k (..., groups, S, E), v (..., groups, S, Ev) of this rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, work: Blockwise) -> Tensor:
        wide = q.to(precise(q.dtype))
        running = Running(wide.new_zeros(*q.shape[:-1], v.shape[-1]), wide.new_full(q.shape[:-1], -math.inf))
        both = torch.cat([k, v], -1)
        for turn in work.turns:
            block = turn.exchange.fetch(both)
            if turn.is_used and wide.numel():
                own_k, own_v = block.split([k.shape[-1], v.shape[-1]], -1)
                attend(running, wide, own_k, own_v, mask, work, turn.interval)
        if work.combined:
            running = _combined(running, work)
        result = running.result.to(q.dtype)
        ctx.save_for_backward(q, k, v, mask, result, running.logarithm)
        ctx.work = work
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        q, k, v, mask, result, logarithm = ctx.saved_tensors
        work: Blockwise = ctx.work
        wide, wide_grad = q.to(precise(q.dtype)), grad.to(precise(q.dtype))
        delta = (result.to(wide.dtype) * wide_grad).sum(-1, keepdim=True)
        dq = torch.zeros_like(wide)
        dmask = torch.zeros_like(mask, dtype=wide.dtype) if mask is not None and ctx.needs_input_grad[3] else None
        both, sizes = torch.cat([k, v], -1), [k.shape[-1], v.shape[-1]]
        back = torch.zeros_like(both)
        for turn in work.turns:
            block = turn.exchange.fetch(both)
            grads = torch.zeros_like(block)
            if turn.is_used and wide.numel():
                own_k, own_v = block.split(sizes, -1)
                of_rows = wide_grad, delta, logarithm, wide
                pair = attend_backward(dq, dmask, of_rows, own_k, own_v, mask, work, turn.interval)
                grads = torch.cat(pair, -1)
            back += turn.exchange.adjoint(grads)
        dk, dv = back.split(sizes, -1)
        return dq.to(q.dtype), dk, dv, None if dmask is None else dmask.to(mask.dtype), None


def _combined(running: Running, work: Blockwise) -> Running:
    """The results of ranks with other keys, joined on each of them."""
    peak = all_reduce(running.logarithm, work.mesh, work.combined, MAX)
    finite = peak.masked_fill(peak == -torch.inf, 0.0)
    shares = (running.logarithm - finite).exp().unsqueeze(-1)
    packed = all_reduce(torch.cat([running.result * shares, shares], -1), work.mesh, work.combined)
    total = packed[..., -1:]
    result = packed[..., :-1] / total.masked_fill(total == 0, 1.0)
    return Running(result, (total.log().squeeze(-1) + finite))


@dataclass(frozen=True)
class Turn:
    """One block: its interval of the dim, and the exchange that fetches it."""

    interval: Interval
    exchange: Exchange

    @property
    def is_used(self) -> bool:
        """Whether this rank reads it."""
        return length(self.interval) > 0


@planned(1024)
def rotation(
    mesh: DeviceMesh, axes: tuple[int, ...], dim: int, owned: tuple[Interval, ...], ends: tuple[int, ...]
) -> tuple[Turn, ...]:
    """The blocks of ``dim`` in turn, this rank's own first; rank r along the axes owns ``owned[r]`` and reads positions
    before ``ends[r]``."""
    extent, ranks, here = max(stop for _, stop in owned), len(owned), coordinate(mesh, axes)

    def block(rank: int, step: int) -> Interval:
        start, stop = owned[(rank + step) % ranks]
        return (start, stop) if start < min(stop, ends[rank]) else EMPTY

    def need(rank: int, step: int) -> Need:
        wanted = block(rank, step)
        return window(wanted, extent) if length(wanted) else ()

    return tuple(
        Turn(block(here, step), exchange(mesh, axes, dim, owned, tuple(need(rank, step) for rank in range(ranks))))
        for step in range(ranks)
    )


TILE_ELEMENTS = 1 << 21  # The most scores that are computed at once, unless one row has more.


@dataclass
class Running:
    """A result so far, in the precision of the sums, and the logarithm of the sum of the exponentials of its scores."""

    result: Tensor
    logarithm: Tensor

    def add(self, result: Tensor, logarithm: Tensor, rows: Interval) -> None:
        """Joins the result of other keys for some rows."""
        ours, mine = self.result[..., slice(*rows), :], self.logarithm[..., slice(*rows)]
        both = torch.logaddexp(mine, logarithm)
        ours.mul_(_share(mine, both)).add_(result * _share(logarithm, both))
        mine.copy_(both)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    """exp(part - whole), a column; 0 where there is nothing."""
    return torch.where(part == -math.inf, 0.0, (part - whole).exp()).unsqueeze(-1)


def _chunks(q: Tensor, keys: int) -> Iterator[Interval]:
    """Intervals of rows of which each makes a tile."""
    rows = q.shape[-2]
    each = max(1, TILE_ELEMENTS // max(1, math.prod(q.shape[:-2]) * keys))
    for start in range(0, rows, each):
        yield start, min(start + each, rows)


def repeated(x: Tensor, heads: int) -> Tensor:
    """Keys or values of grouped heads, each for all heads of its group."""
    return x if x.dim() < 3 or x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def _summed(grad: Tensor, groups: int) -> Tensor:
    """The gradient of keys or values of grouped heads."""
    heads = grad.shape[-3] if grad.dim() > 2 else groups
    return grad if heads == groups else grad.unflatten(-3, (groups, heads // groups)).sum(-3)


def _has_kernel(q: Tensor, v: Tensor, mask: Tensor | None, work: Blockwise) -> bool:
    """Whether torch has a kernel that gives such a result together with its logarithm."""
    plain = mask is None and not work.causal
    return plain and q.device.type == "cpu" and q.dim() == 4 and q.shape[-1] == v.shape[-1] and v.shape[-2] > 0


def _in_rows(x: Tensor) -> Tensor:
    """With the features of a token side by side in memory, as that kernel takes them without looking."""
    fits = x.stride(-1) == 1 and x.stride(-2) >= x.shape[-1]
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def attend(
    running: Running, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, work: Blockwise, columns: Interval
) -> None:
    """Adds to a running result the attention to the keys at ``columns`` of all."""
    heads = q.shape[-3] if q.dim() > 2 else 1
    k, v = repeated(k, heads).to(q.dtype), repeated(v, heads).to(q.dtype)
    if _has_kernel(q, v, mask, work):
        attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        result, logarithm = attention(_in_rows(q), _in_rows(k), _in_rows(v), scale=work.scale)
        running.add(result, logarithm, (0, q.shape[-2]))
        return
    for own in _chunks(q, k.shape[-2]):
        tile = work.scores(q[..., slice(*own), :], k, mask, own, columns)
        peak = tile.amax(-1, keepdim=True)
        peak = peak.masked_fill(peak == -math.inf, 0.0)
        weights = tile.sub_(peak).exp_()
        total = weights.sum(-1, keepdim=True)
        result = torch.matmul(weights, v) / total.masked_fill(total == 0, 1.0)
        running.add(result, (total.log() + peak).squeeze(-1), own)


def attend_backward(
    dq: Tensor,
    dmask: Tensor | None,
    of_rows: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    work: Blockwise,
    columns: Interval,
) -> tuple[Tensor, Tensor]:
    """The gradients of keys and values at ``columns`` of all; adds to ``dq`` and ``dmask``, those of queries and mask.

    ``of_rows``: the result's gradient dy; delta, the sum over features of the result times dy, a column; the logarithm
    of the sum of the exponentials; and the queries. With P the weights: dS = P (dP - delta), dq = scale dS k,
    dk = scale dS^T q, dv = P^T dy.
    """
    grad, delta, logarithm, q = of_rows
    groups, heads = (k.shape[-3], q.shape[-3]) if q.dim() > 2 else (1, 1)
    wide_k, wide_v = repeated(k, heads).to(q.dtype), repeated(v, heads).to(q.dtype)
    dk, dv = torch.zeros_like(wide_k), torch.zeros_like(wide_v)
    for own in _chunks(q, k.shape[-2]):
        rows = slice(*own)
        own_q, own_grad = q[..., rows, :], grad[..., rows, :]
        tile = work.scores(own_q, wide_k, mask, own, columns)
        sums = logarithm[..., rows].unsqueeze(-1)
        weights = tile.sub_(sums.masked_fill(sums == -math.inf, 0.0)).exp_()
        dv += torch.matmul(weights.transpose(-2, -1), own_grad)
        slopes = torch.matmul(own_grad, wide_v.transpose(-2, -1)).sub_(delta[..., rows, :]).mul_(weights)
        if dmask is not None:
            part = _of_tile(dmask, own, columns)
            part += slopes.sum_to_size(part.shape)
        dq[..., rows, :] += torch.matmul(slopes, wide_k) * work.scale
        dk += torch.matmul(slopes.transpose(-2, -1), own_q) * work.scale
    return _summed(dk, groups).to(k.dtype), _summed(dv, groups).to(v.dtype)
