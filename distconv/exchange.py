"""The one collective of distconv: fetch intervals of a dim from the ranks that own them; the adjoint adds them back.

An exchange is made from what every rank of one mesh axis owns and needs, and cached by it. Every rank computes all
plans from the same shapes, so all agree, without a message, on what moves and on whether anything moves at all.

    owned = ownership(extent, ranks)                                 # (start, stop) per rank of the axis
    needs = tuple(window((a - 1, b + 1), extent) for a, b in owned)  # one more on each side, fill at the edge
    halo = exchange(mesh, axis, dim, owned, needs)
    wide = halo.fetch(local)                                         # local: the owned interval along `dim`
    grad_local = halo.adjoint(grad_wide)                             # the transposed linear map
"""

from __future__ import annotations

import functools
import math
import os
import time
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.group import joint_group, joint_order
from distconv.needs import FILL, OWN, Need, Part, Plan, make_plan
from mucudnn.geometry import Interval, length

AWAKE_SECONDS = 5e-4
"""How long a rank looks for its messages on a CPU, other threads going first, before it sleeps until they come."""


class Exchange:
    """A plan bound to the process group of a mesh axis and to the dim it shards. Make it with :func:`exchange`.

    ``sent`` and ``received`` count the positions of the dim that ``fetch`` moves to and from each peer.
    """

    def __init__(self, plan: Plan, dim: int, group: dist.ProcessGroup | None, ranks: int) -> None:
        self.plan, self.dim, self.group, self.ranks = plan, dim, group, ranks
        self.sent = _per_peer(plan.sends, ranks)
        self.received = _per_peer(plan.receives, ranks)
        readers = Counter(part.block for part in plan.parts)
        self._read_once = {
            part.block
            for part in plan.parts
            if readers[part.block] == 1
            and part.step
            and part.block != FILL
            and part.length == plan.extent_of(part.block)
        }
        """The blocks that are needed once, and all of each: what comes back for one is no sum."""
        whole = Part(OWN, 0, plan.own, 1)
        self.is_identity = plan.silent and (plan.parts == (whole,) or (not plan.parts and not plan.own))

    def fetch(self, local: Tensor, fill: float = 0.0) -> Tensor:
        """What this rank needs, from ``local``, the interval it owns; ``fill`` where the need says so.

        Collective over the axis, unless the plan is silent. Returns ``local`` itself where it is what is needed.
        """
        if self.is_identity:
            return local
        plan, dim, shape = self.plan, self.dim, local.shape
        rest = _rest(shape, dim)
        blocks: list[Tensor] = []
        if rest and not plan.silent:
            buffer = local.new_empty(sum(self.received) * rest)
            messages = _flat([local.narrow(dim, start, stop - start) for _, (start, stop) in plan.sends], local)
            sent, received = [count * rest for count in self.sent], [count * rest for count in self.received]
            all_to_all(buffer, messages, received, sent, self.group)
            offset = 0
            for _, (start, stop) in plan.receives:
                count = (stop - start) * rest
                blocks.append(buffer.narrow(0, offset, count).view(_with(shape, dim, stop - start)))
                offset += count
        else:
            blocks = [local.new_empty(_with(shape, dim, stop - start)) for _, (start, stop) in plan.receives]
        return self._assemble(local, blocks, fill)

    def adjoint(self, grad: Tensor) -> Tensor:
        """The transpose of ``fetch`` with fill 0: sends every element back to its owner, who adds. Collective alike."""
        plan, dim = self.plan, self.dim
        if self.is_identity:
            return grad
        shape = list(grad.shape)
        sums: dict[int, Tensor] = {}
        position = 0
        for part in plan.parts:
            piece = grad.narrow(dim, position, part.length)
            position += part.length
            if part.block == FILL:
                continue
            if part.step == 0:
                piece = piece.sum(dim, keepdim=True)
            elif part.step < 0:
                piece = piece.flip(dim)
            if part.block in self._read_once:
                sums[part.block] = piece
                continue
            if part.block not in sums:
                sums[part.block] = grad.new_zeros(_with(shape, dim, plan.extent_of(part.block)))
            run = piece.shape[dim]
            start = part.start - run + 1 if part.step < 0 else part.start
            sums[part.block].narrow(dim, start, run).add_(piece)
        own = sums.pop(OWN) if OWN in sums else grad.new_zeros(_with(shape, dim, plan.own))
        rest = _rest(shape, dim)
        if plan.silent or not rest:
            return own.clone(memory_format=torch.contiguous_format) if OWN in self._read_once else own
        returned = grad.new_empty(sum(self.sent) * rest)
        back, forth = [count * rest for count in self.sent], [count * rest for count in self.received]
        all_to_all(returned, _flat([sums[block] for block in sorted(sums)], grad), back, forth, self.group)
        if OWN in self._read_once:
            if len(plan.sends) == 1 and sum(self.sent) == plan.own:
                return returned.view(own.shape).add_(own)
            own = own.clone(memory_format=torch.contiguous_format)
        offset = 0
        for _, (start, stop) in plan.sends:
            count = (stop - start) * rest
            own.narrow(dim, start, stop - start).add_(
                returned.narrow(0, offset, count).view(_with(shape, dim, stop - start))
            )
            offset += count
        return own

    def _assemble(self, local: Tensor, blocks: Sequence[Tensor], fill: float) -> Tensor:
        dim, shape = self.dim, local.shape
        pieces: list[Tensor] = []
        for part in self.plan.parts:
            if part.block == FILL:
                pieces.append(local.new_full(_with(shape, dim, part.length), fill))
                continue
            block = local if part.block == OWN else blocks[part.block]
            if part.step == 0:
                pieces.append(block.narrow(dim, part.start, 1).expand(_with(shape, dim, part.length)))
            elif part.step < 0:
                pieces.append(block.narrow(dim, part.start - part.length + 1, part.length).flip(dim))
            else:
                pieces.append(block.narrow(dim, part.start, part.length))
        if not pieces:
            return local.new_empty(_with(shape, dim, 0))
        format = torch.channels_last if local.dim() == 4 else torch.channels_last_3d
        if local.dim() in (4, 5) and not local.is_contiguous() and local.is_contiguous(memory_format=format):
            extents = _with(shape, dim, self.plan.extent)
            wide = torch.empty(extents, dtype=local.dtype, device=local.device, memory_format=format)
            return torch.cat(pieces, dim, out=wide)
        return torch.cat(pieces, dim)


@functools.lru_cache(maxsize=16384)
def exchange(
    mesh: DeviceMesh, axes: int | tuple[int, ...], dim: int, owned: tuple[Interval, ...], needs: tuple[Need, ...]
) -> Exchange:
    """The exchange along ``dim`` over a mesh axis whose rank r owns ``owned[r]`` and needs ``needs[r]``.

    Over several axes, r counts their coordinates, the last running fastest. Made without communication (but for the
    process group of several axes, the first time); all ranks of the axes must ask for the same.
    """
    axes = (axes,) if isinstance(axes, int) else axes
    if len(axes) == 1:
        group, rank = mesh.get_group(axes[0]), mesh.get_local_rank(axes[0])
    elif not axes:
        group, rank = None, 0
    else:
        group, (order, rank) = joint_group(mesh, axes), joint_order(mesh, axes)
        owned, needs = tuple(owned[at] for at in order), tuple(needs[at] for at in order)
    return Exchange(make_plan(owned, needs, rank), dim, group, len(owned))


def _per_peer(moves: Iterable[tuple[int, Interval]], ranks: int) -> tuple[int, ...]:
    counts = [0] * ranks
    for peer, interval in moves:
        counts[peer] += length(interval)
    return tuple(counts)


def _with(shape: Sequence[int], dim: int, extent: int) -> list[int]:
    changed = list(shape)
    changed[dim] = extent
    return changed


def _rest(shape: Sequence[int], dim: int) -> int:
    """Elements per position of the dim."""
    return math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])


def _flat(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    if not tensors:
        return like.new_empty(0)
    if len(tensors) == 1:
        return tensors[0].reshape(-1).contiguous()
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def all_to_all(
    output: Tensor, input: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup | None
) -> None:
    """Flat ``input``, cut by ``sent``, to the members of the group; flat ``output`` from them, cut by ``received``."""
    work = dist.all_to_all_single(output, input, received, sent, group=group, async_op=True)
    assert work is not None  # every caller is a member of the group
    if output.device.type == "cpu":
        # A halo on its way arrives sooner than a sleeping thread wakes up.
        patience = time.perf_counter() + AWAKE_SECONDS
        while not work.is_completed() and time.perf_counter() < patience:
            os.sched_yield()
    work.wait()
