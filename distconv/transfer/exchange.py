"""Exchanges: fetch intervals of a dim from the ranks that own them; the adjoint adds them back.

An exchange is made from what every rank of one mesh axis owns and needs, and cached by it. Every rank computes all
plans from the same shapes, so all agree, without a message, on what moves and on whether anything moves at all.

    owned = ownership(extent, ranks)                                 # (start, stop) per rank of the axis
    needs = tuple(window((a - 1, b + 1), extent) for a, b in owned)  # one more on each side, fill at the edge
    halo = exchange(mesh, axis, dim, owned, needs)
    wide = halo.fetch(local)                                         # local: the owned interval along `dim`
    grad_local = halo.adjoint(grad_wide)                             # the transposed linear map
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.tensors.dtensors import memory_format
from distconv.transfer.collectives import new_empty, new_full
from distconv.transfer.group import joint_order, urgent_group
from distconv.transfer.needs import OWN, ExchangePlan, Need, Piece, make_exchange_plan, picture
from distconv.transfer.route import AllToAll, Route, part, per_peer, unpacked
from distconv.transfer.tracing import planned
from mucudnn.convolution.geometry import Interval, length
from mucudnn.process import Recent


class Exchange:
    """A plan bound to the process group of a mesh axis and to the dim it shards. Make it with :func:`exchange`.

    ``route`` counts the positions of the dim that ``fetch`` moves to and from each peer. ``print`` draws an exchange;
    that of a kernel of 3 over 3 ranks, padded by 1:

        along dim 2: 12 positions, 3 ranks: o owned, s owned and sent, ^ received, - neither
        r0   ooos^-------  1 from r1, fills 1
        r1   ---^soos^---  1 from r0, 1 from r2
        r2   -------^sooo  1 from r1, fills 1
    """

    def __init__(
        self,
        plan: ExchangePlan,
        dim: int,
        group: dist.ProcessGroup | None,
        owned: tuple[Interval, ...],
        needs: tuple[Need, ...],
    ) -> None:
        self.plan, self.dim, self._owned, self._needs = plan, dim, owned, needs
        self._shows_format = all(length(interval) > (dim == 1) for interval in owned)
        """Whether all ranks see the memory format of the whole; otherwise, what they fetch is contiguous."""
        ranks = len(owned)
        sent, received = (
            per_peer(((peer, length(interval)) for peer, interval in moves), ranks)
            for moves in (plan.sends, plan.receives)
        )
        self.route = Route(sent, received, group)
        read = [piece for piece in plan.pieces if piece.start is not None]
        readers = Counter(piece.source for piece in read)
        self._read_once = {
            piece.source
            for piece in read
            if readers[piece.source] == 1 and piece.step and piece.length == plan.extent_of(piece.source)
        }
        """The sources that one piece alone reads, and reads whole: their gradients need no addition."""
        self._known: Recent[Sequence[int], tuple[int, list[list[int]]]] = Recent(64)
        whole = Piece(plan.own, 0, source=OWN)
        self.is_identity = plan.silent and (plan.pieces == (whole,) or (not plan.pieces and not plan.own))

    def __str__(self) -> str:
        return f"along dim {self.dim}: {picture(self._owned, self._needs)}"

    def __repr__(self) -> str:
        return f"Exchange(dim={self.dim}, {self.route})"

    def fetch(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """This rank's need, from ``local``, the interval that it owns; ``fill`` where the need says so.

        Collective over the axis, unless the plan is silent. Returns ``local`` itself where it is what is needed.
        """
        if self.is_identity:
            return local
        rest, shapes = self._known.get(local.shape) or self._extents(local.shape)
        received = self._received(self._send(local, rest), local, shapes)
        return self._joined(self._pieces(local, received, self.plan.pieces, fill), local)

    def fetch_in_turn(self, local: Tensor) -> Iterator[tuple[Interval, Tensor]]:
        """``fetch`` with fill 0, piece by piece: yields intervals of the need, at least one, each with its elements.

        The elements that this rank owns come first, so that the caller works on them while the others are on their way;
        they may be views of ``local``. Nothing is sent before the first interval is asked for.
        """
        if self.is_identity:
            yield (0, self.plan.own), local
            return
        rest, shapes = self._known.get(local.shape) or self._extents(local.shape)
        way = self._send(local, rest)
        yield from self._in_turn(local, [], self.plan.at_hand)
        yield from self._in_turn(local, self._received(way, local, shapes), self.plan.from_others)
        if not self.plan.pieces:
            yield (0, 0), local.narrow(self.dim, 0, 0)

    def adjoint(self, grad: Tensor) -> Tensor:
        """The transpose of ``fetch`` with fill 0: sends every element back to its owner, who adds. Collective."""
        if self.is_identity:
            return grad
        return self.adjoint_in_turn(lambda at: grad.narrow(self.dim, at[0], length(at)), grad.shape, grad)

    def adjoint_in_turn(self, make: Callable[[Interval], Tensor], shape: Sequence[int], like: Tensor) -> Tensor:
        """``adjoint`` of a gradient that ``make(interval)`` makes piece by piece: first the elements of other ranks,
        then, while these are on their way, the rest.

        ``shape`` is that of the gradient, in which the exchange's dim does not matter; dtype and device are those of
        ``like``.
        """
        plan, dim = self.plan, self.dim
        if self.is_identity:
            return make((0, plan.own))
        sums: dict[int, Tensor] = {}
        for interval, pieces in plan.from_others:
            self._add_up(sums, pieces, make(interval))
        rest = _rest(shape, dim)
        way = None
        if rest and not plan.silent:
            way = self.route.back.send([sums[source] for source in sorted(sums)], like, rest)
        sums.clear()
        for interval, pieces in plan.at_hand:
            self._add_up(sums, pieces, make(interval))
        own = sums[OWN] if OWN in sums else like.new_zeros(_with(shape, dim, plan.own))
        if way is None:
            return own.clone(memory_format=torch.contiguous_format) if OWN in self._read_once else own
        returned = way.wait()
        if OWN in self._read_once:
            if len(plan.sends) == 1 and sum(self.route.sent) == plan.own:
                return returned.view(own.shape).add_(own)
            own = own.clone(memory_format=torch.contiguous_format)
        grads = unpacked(returned, [_with(shape, dim, length(interval)) for _, interval in plan.sends])
        for (_, interval), grad in zip(plan.sends, grads, strict=True):
            part(own, dim, interval).add_(grad)
        return own

    def _send(self, local: Tensor, rest: int) -> AllToAll | None:
        """Sends the parts of ``local`` that other ranks need; None if nothing moves."""
        if not rest or self.plan.silent:
            return None
        return self.route.send([part(local, self.dim, interval) for _, interval in self.plan.sends], local, rest)

    def _received(self, way: AllToAll | None, local: Tensor, shapes: list[list[int]]) -> list[Tensor]:
        """The received intervals."""
        if way is None:
            return [new_empty(local, shape) for shape in shapes]
        return unpacked(way.wait(), shapes)

    def _extents(self, shape: Sequence[int]) -> tuple[int, list[list[int]]]:
        """Of local tensors of a shape: the elements per position of the dim, and the shapes of what is received."""
        received = [_with(shape, self.dim, length(interval)) for _, interval in self.plan.receives]
        self._known[shape] = found = _rest(shape, self.dim), received
        return found

    def _in_turn(
        self, local: Tensor, received: Sequence[Tensor], rows: Sequence[tuple[Interval, Need]]
    ) -> Iterator[tuple[Interval, Tensor]]:
        for interval, row in rows:
            pieces = self._pieces(local, received, row, 0.0)
            yield interval, pieces[0] if len(pieces) == 1 else self._joined(pieces, local)

    def _pieces(self, local: Tensor, received: Sequence[Tensor], pieces: Need, fill: float) -> list[Tensor]:
        dim, shape = self.dim, local.shape
        found: list[Tensor] = []
        for piece in pieces:
            if piece.start is None:
                found.append(new_full(local, _with(shape, dim, piece.length), fill))
                continue
            source = local if piece.source == OWN else received[piece.source]
            if piece.step == 0:
                found.append(source.narrow(dim, piece.start, 1).expand(_with(shape, dim, piece.length)))
            else:
                read = part(source, dim, piece.reads)
                found.append(read.flip(dim) if piece.step < 0 else read)
        return found

    def _joined(self, pieces: list[Tensor], local: Tensor) -> Tensor:
        """The pieces one after another along the dim, in the memory format of ``local``."""
        dim = self.dim
        if not pieces:
            return new_empty(local, _with(local.shape, dim, 0))
        form = torch.contiguous_format if local.is_contiguous() or not self._shows_format else memory_format(local)
        if form is torch.contiguous_format:
            return torch.cat(pieces, dim).contiguous()
        extents = _with(local.shape, dim, sum(piece.shape[dim] for piece in pieces))
        wide = torch.empty(extents, dtype=local.dtype, device=local.device, memory_format=form)
        return torch.cat(pieces, dim, out=wide)

    def _add_up(self, sums: dict[int, Tensor], pieces: Need, grad: Tensor) -> None:
        """Adds the gradient of successive pieces to those of the sources that they read."""
        dim, position = self.dim, 0
        for piece in pieces:
            own = part(grad, dim, (position, position + piece.length))
            position += piece.length
            if piece.start is None:
                continue
            if piece.step == 0:
                own = own.sum(dim, keepdim=True)
            elif piece.step < 0:
                own = own.flip(dim)
            if piece.source in self._read_once:
                sums[piece.source] = own
                continue
            if piece.source not in sums:
                sums[piece.source] = grad.new_zeros(_with(grad.shape, dim, self.plan.extent_of(piece.source)))
            part(sums[piece.source], dim, piece.reads).add_(own)


class Exchanges:
    """Exchanges along several dims, one after the other: a transfer."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self.exchanges = [each for each in exchanges if not each.is_identity]

    def __repr__(self) -> str:
        return f"Exchanges({self.exchanges})"

    def fetch(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """This rank's need along all dims, from the part that it owns; ``fill`` where the needs say so."""
        for each in self.exchanges:
            local = each.fetch(local, fill)
        return local

    def adjoint(self, grad: Tensor) -> Tensor:
        """The transpose of ``fetch`` with fill 0: sums the gradients of all ranks that received an element."""
        for each in reversed(self.exchanges):
            grad = each.adjoint(grad)
        return grad


@planned(16384)
def exchange(
    mesh: DeviceMesh, axes: int | tuple[int, ...], dim: int, owned: tuple[Interval, ...], needs: tuple[Need, ...]
) -> Exchange:
    """The exchange along ``dim`` over a mesh axis whose rank r owns ``owned[r]`` and needs ``needs[r]``.

    Over several axes, r counts their coordinates, the last running fastest. Made without communication (but for the
    process group of several axes, the first time); all ranks of the axes must ask for the same.
    """
    axes = (axes,) if isinstance(axes, int) else axes
    if len(axes) == 1:
        group, rank = urgent_group(mesh, axes), mesh.get_local_rank(axes[0])
    elif not axes:
        group, rank = None, 0
    else:
        group, (order, rank) = urgent_group(mesh, axes), joint_order(mesh, axes)
        owned, needs = tuple(owned[at] for at in order), tuple(needs[at] for at in order)
    return Exchange(make_exchange_plan(owned, needs, rank), dim, group, owned, needs)


def _with(shape: Sequence[int], dim: int, extent: int) -> list[int]:
    changed = list(shape)
    changed[dim] = extent
    return changed


def _rest(shape: Sequence[int], dim: int) -> int:
    """Elements per position of the dim."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
