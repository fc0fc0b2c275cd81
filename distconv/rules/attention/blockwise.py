"""Attention of this rank's queries to keys of other ranks: blocks of keys arrive in turn, and their results are joined.

No rank ever has all keys, nor all scores of its queries. Block s of a rank belongs to the rank s places further along.
It is received directly from its owner, so that each element is sent once, and its gradient goes directly back. A block
to which no query of a rank attends is not sent. Backward fetches the keys and values once more, and recomputes their
weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from distconv.rules.attention.tiles import Running, Scores, TileGradients, attend, attend_backward
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

    def scores(self, mask: Tensor | None) -> Scores:
        return Scores(self.scale, self.causal, self.rows, mask)


class BlockwiseAttention(torch.autograd.Function):
    """The result of plain q (..., heads, L, E), k (..., groups, S, E), v (..., groups, S, Ev) of this rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, work: Blockwise) -> Tensor:
        wide = q.to(precise(q.dtype))
        running = Running.start(wide, v.shape[-1])
        both, scores = torch.cat([k, v], -1), work.scores(mask)
        for turn, block in blocks(work.turns, both):
            if wide.numel():
                own_k, own_v = block.split([k.shape[-1], v.shape[-1]], -1)
                attend(running, wide, own_k, own_v, scores, turn.interval)
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
        for_mask = mask if mask is not None and ctx.needs_input_grad[3] else None
        into = TileGradients(
            torch.zeros_like(wide), None if for_mask is None else torch.zeros_like(for_mask, dtype=wide.dtype)
        )
        both, scores, sizes = torch.cat([k, v], -1), work.scores(mask), [k.shape[-1], v.shape[-1]]
        back = torch.zeros_like(both)
        for turn in work.turns:
            block = turn.exchange.fetch(both)
            grads = torch.zeros_like(block)
            if turn.is_used and wide.numel():
                own_k, own_v = block.split(sizes, -1)
                pair = attend_backward(into, wide_grad, delta, logarithm, wide, own_k, own_v, scores, turn.interval)
                grads = torch.cat(pair, -1)
            back += turn.exchange.adjoint(grads)
        dk, dv = back.split(sizes, -1)
        return into.query.to(q.dtype), dk, dv, None if into.mask is None else into.mask.to(mask.dtype), None


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


def blocks(turns: tuple[Turn, ...], local: Tensor) -> Iterator[tuple[Turn, Tensor]]:
    """The blocks that this rank reads, one after the other. Collective; exhaust it."""
    for turn in turns:
        block = turn.exchange.fetch(local)
        if turn.is_used:
            yield turn, block
