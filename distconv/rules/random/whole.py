"""The random numbers that one process draws for a whole tensor; a rank keeps those of its shard.

The same operator as in one process draws them from torch's default generator, on every rank, in bounded memory: a large
tensor is drawn piece by piece. The order of numbers is the order of elements in the memory of one process. So a piece
has elements that are adjacent there, in multiples of 16, the number of normal variates that torch makes at once.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.rules.schemas import operator
from distconv.tensors.layouts import Layout
from distconv.tensors.mesh import sharded_dims
from distconv.transfer.tracing import planned

PIECE = 1 << 18  # The most elements that are drawn at once of a tensor that has more.

MOST_BYTES = 64 << 20  # The largest tensor that is drawn at once by an operator that cannot draw in pieces.

GROUP = 16


class WholeDraw(NamedTuple):
    """A tensor of one process, and where this rank's part begins."""

    shape: tuple[int, ...]  # The shape of the whole tensor.
    order: tuple[int, ...]
    """Its dims as they follow one another in memory, the innermost last; () where it is contiguous."""
    starts: tuple[int, ...]  # The first index that this rank owns, along every dim.


def can_be_drawn(whole: WholeDraw, dtype: torch.dtype, name: str, arguments: Sequence[Any]) -> bool:
    """Whether `fill_part` needs little memory; the same on every rank."""
    elements = math.prod(whole.shape)
    return elements * dtype.itemsize <= MOST_BYTES or in_sequence(
        name, dtype, bool(whole.order) and name == "normal_", tuple(arguments)
    )


class _Draw(NamedTuple):
    """The way in which numbers are drawn, their type, and how an operator computes its result from them."""

    dtype: torch.dtype
    draw: Callable[[Tensor], Any]
    made_of: Callable[[Tensor], Tensor]


def fill_part(part: Tensor, whole: WholeDraw, name: str, arguments: Sequence[Any]) -> None:
    """Writes to this rank's part what the operator in place that is named writes to the whole tensor."""
    shape, order, starts = whole
    in_place, elements = operator(name), math.prod(whole.shape)
    draw = _Draw(part.dtype, lambda x: in_place(x, *arguments), lambda x: x)
    if name == "bernoulli_.float" and is_made_of_integers(part.dtype, *arguments):
        draw = _Draw(torch.int64, lambda x: x.random_(), lambda x: _below(x, *arguments))
    elif tuple(part.shape) == shape and part.is_contiguous() is not bool(order):
        in_place(part, *arguments)
        return
    gaps = bool(order) and name == "normal_"
    order = order or tuple(range(len(shape)))
    if elements <= PIECE or not in_sequence(name, part.dtype, gaps, tuple(arguments)):
        drawn = _empty([shape[dim] for dim in order], draw.dtype, part.device, gaps)
        drawn = drawn.permute([order.index(dim) for dim in range(len(shape))])
        draw.draw(drawn)
        for dim, (start, extent) in enumerate(zip(starts, part.shape, strict=True)):
            drawn = drawn.narrow(dim, start, extent)
        part.copy_(draw.made_of(drawn))
    else:
        sequence = _Sequence(elements, _empty([PIECE + 4 * GROUP], draw.dtype, part.device, gaps), draw.draw)
        shape, starts = (tuple(of[dim] for dim in order) for of in (shape, starts))
        _fill_in_order(part.permute(order), shape, starts, sequence, draw.made_of)


def _empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device, gaps: bool) -> Tensor:
    """Memory to draw into; normal numbers are others where it is not contiguous, as a whole with gaps is not."""
    memory = torch.empty((*shape, 2) if gaps else tuple(shape), dtype=dtype, device=device)
    return memory[..., 0] if gaps else memory


_BITS = 53


def _below(integers: Tensor, share: float = 0.5) -> Tensor:
    """Where numbers from 0 to 1, made of the last bits of the integers, are less than a share."""
    return integers.bitwise_and_((1 << _BITS) - 1) < math.ceil(share * (1 << _BITS))


@planned(maxsize=256)
def is_made_of_integers(dtype: torch.dtype, share: float = 0.5) -> bool:
    """Whether `bernoulli_` compares 64 bits an element with the share, which takes longer. This is tried."""
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    drawn = torch.zeros(64 * GROUP, dtype=dtype).bernoulli_(share, generator=generators[0])
    integers = torch.zeros(64 * GROUP, dtype=torch.int64).random_(generator=generators[1])
    states = [generator.get_state() for generator in generators]
    return torch.equal(drawn, _below(integers, share).to(dtype)) and torch.equal(*states)


@planned(maxsize=256)
def in_sequence(name: str, dtype: torch.dtype, gaps: bool, arguments: tuple[Any, ...]) -> bool:
    """Whether an operator draws one element after the other, and so in pieces what it draws at once. This is tried.

    Some processors' libraries take one number and make all elements of it.
    """
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    at_once, in_pieces = (torch.zeros((5 * GROUP, 2), dtype=dtype)[:, 0] for _ in range(2))
    if not gaps:
        at_once, in_pieces = at_once.clone(), in_pieces.clone()
    in_place = operator(name)
    in_place(at_once, *arguments, generator=generators[0])
    for piece in in_pieces.split([2 * GROUP, 3 * GROUP]):
        in_place(piece, *arguments, generator=generators[1])
    states = [generator.get_state() for generator in generators]
    return torch.equal(at_once, in_pieces) and torch.equal(*states)


class _Sequence:
    """Random numbers one after the other, as drawn at once."""

    def __init__(self, elements: int, memory: Tensor, draw: Callable[[Tensor], Any]) -> None:
        self._memory, self._draw = memory, draw
        self._left, self._begin, self._end = elements, 0, 0

    def take(self, count: int) -> Tensor:
        """The next `count` of them, at most `PIECE`; the memory is overwritten by the next call."""
        there = self._end - self._begin
        if there < count:
            self._memory[:there] = self._memory[self._begin : self._end].clone()
            more = min(self._left, -(-(count - there) // GROUP) * GROUP)
            if self._left - more < GROUP:  # normal numbers end with a whole group
                more = self._left
            self._draw(self._memory[there : there + more])
            self._left, self._begin, self._end = self._left - more, 0, there + more
        self._begin += count
        return self._memory[self._begin - count : self._begin]


def _fill_in_order(
    part: Tensor, shape: Sequence[int], starts: Sequence[int], sequence: _Sequence, made_of: Callable[[Tensor], Tensor]
) -> None:
    """Fills this rank's part of a tensor, both with the dims in the order of memory."""
    inner, dim = 1, len(shape) - 1  # of dim some indices at once, of those behind it all, together `inner` elements
    while inner * shape[dim] <= PIECE:
        inner, dim = inner * shape[dim], dim - 1
    own = [(start, start + extent) for start, extent in zip(starts, part.shape, strict=True)]
    behind: tuple[Any, ...] = tuple(slice(*interval) for interval in own[dim + 1 :])
    step = PIECE // inner
    for before in itertools.product(*map(range, shape[:dim])):
        is_own = all(a <= index < b for index, (a, b) in zip(before, own, strict=False))
        for begin in range(0, shape[dim], step):
            end = min(begin + step, shape[dim])
            piece = sequence.take((end - begin) * inner)
            a, b = max(begin, own[dim][0]), min(end, own[dim][1])
            if is_own and a < b:
                at: tuple[Any, ...] = tuple(index - start for index, (start, _) in zip(before, own, strict=False))
                drawn = piece.view(end - begin, *shape[dim + 1 :])[(slice(a - begin, b - begin), *behind)]
                part[(*at, slice(a - own[dim][0], b - own[dim][0]))].copy_(made_of(drawn))


def seed_of_shards() -> torch.Tensor:
    """The number that all ranks take from the default generator for one call."""
    return torch.randint(1 << 62, ())


def shard_coordinates(where: Layout) -> list[int]:
    """Which shard of a tensor this rank has."""
    mesh, placements = where
    return [mesh.get_local_rank(axis) for axis, _ in sharded_dims(mesh, placements)]


@contextlib.contextmanager
def own_numbers(seed: int, shard: Sequence[int], device: torch.device) -> Iterator[None]:
    """Random numbers within are drawn from a generator state of this shard; then the default one continues."""
    for coordinate in shard:
        seed = (seed * 6364136223846793005 + 1442695040888963407 + coordinate) % (1 << 63)
    source: Any = torch.cuda if device.type == "cuda" else torch
    state = source.get_rng_state()
    try:
        source.manual_seed(seed)
        yield
    finally:
        source.set_rng_state(state)


@contextlib.contextmanager
def numbers_of(generator: torch.Generator | None) -> Iterator[None]:
    """A context in which the default generator goes on from the state of the script's own, and hands it back."""
    if generator is None:
        yield
        return
    source: Any = torch.cuda if generator.device.type == "cuda" else torch
    state = source.get_rng_state()
    source.set_rng_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(source.get_rng_state())
        source.set_rng_state(state)
