"""Rotation of keys and values: every rank sees the block of every other rank in turn, one block at a time.

Block s of a rank belongs to the rank s places further along. It is received directly from its owner, so that each
element is sent once, and its gradient goes directly back. A block to which no query of a rank attends is not sent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors.layouts import coordinate
from distconv.transfer.exchange import Exchange, exchange
from distconv.transfer.needs import Need, window
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import EMPTY, Interval, length


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
