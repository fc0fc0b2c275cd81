"""Running statistics: norms write the statistics of a batch to their buffers, at once or when the model's call ends.

A buffer is whole on every rank. So where channels are sharded, the ranks exchange what each has found for its own: once
for all norms, at the end of a call. Whoever reads a buffer from its module before that finds it up to date. A compiled
graph does so for the buffers that one of its functions alone reads (`begin_graph`, `end_graph`).
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import _StopRecomputationError

from distconv.rules.normalization.shares import StatisticsShare, gathered, of_all
from distconv.transfer.tracing import is_traced


class _Move(NamedTuple):
    """A buffer moves by ``momentum`` of the way to ``factor`` times a value."""

    buffer: Tensor
    value: Tensor
    momentum: float
    factor: float


class Found(NamedTuple):
    """A rank's statistics of its own elements, biased, for buffers that follow those of all ranks."""

    buffers: tuple[Tensor, Tensor]  # The buffers of the mean and of the variance.
    mean: Tensor
    variance: Tensor
    share: StatisticsShare
    momentum: float
    sharded: Any  # The mesh and the axes of the channels; None where nothing shards them.


class _Thread(threading.local):
    moves: dict[int, tuple[_Move, Any] | Found | Tensor] | None = None
    """In the call that is running, by the ids of buffers, with the axes of their channels; None outside of one. The
    buffers of `count` are there themselves."""
    buffers: frozenset[int] = frozenset()  # The ids of the buffers of the modules of that call.
    traced: tuple[Sequence[Tensor], list[tuple[_Move, Any] | Found]] = (), []
    """Of the graph that is traced: buffers that nothing reads again once they are moved, and their moves."""

    def __init__(self) -> None:
        self.left: list[Any] = []  # What was to be written at the end of calls that ended by an exception.
        self.reading: dict[nn.Module, dict[str, Any]] = {}  # Their modules, with their own dicts of buffers.


_thread = _Thread()


def move(
    buffer: Tensor, value: Tensor, mesh: DeviceMesh, axes: tuple[int, ...], momentum: float, factor: float = 1.0
) -> None:
    """Move a running statistic towards ``factor`` times this rank's value, one number per own channel.

    That of a module that runs (`is_a_modules`) moves at the latest when the call ends. ``axes``: those that shard the
    channels. Collective where there are any and the buffer is whole.
    """
    if type(buffer) is not Tensor and isinstance(buffer, DTensor):
        axes = () if Shard(0) in buffer.placements else axes
        buffer = buffer._local_tensor
    if value.dtype is not buffer.dtype:
        value = value.to(buffer.dtype)
    later = _Move(buffer, value, momentum, factor), (mesh, axes) if axes else None
    waits, key = _thread.moves, id(buffer)
    if waits is not None and key in _thread.buffers and (type(value) is Tensor or not is_traced(value)):
        if key in waits:
            _settle()
        waits[key] = later
    elif axes and _is_traced_last(buffer):
        _thread.traced[1].append(later)
    else:
        _write([later])


def count(batches: Tensor) -> None:
    """Add 1 to a buffer; to that of a module that runs at the latest when the call ends."""
    waits, key = _thread.moves, id(batches)
    if waits is None or key not in _thread.buffers:
        batches.add_(1)
        return
    if key in waits:
        _settle()
    waits[key] = batches


def combine_later(found: Found) -> None:
    """The same of the mean and the unbiased variance of all ranks of a share.

    Norms with equal shares of elements are combined by one exchange: when the call ends, or the graph that is
    traced. The buffers are such that this can wait (`can_wait`).
    """
    if is_traced(found.mean):
        _thread.traced[1].append(found)
        return
    waits = _thread.moves
    assert waits is not None
    if any(id(buffer) in waits for buffer in found.buffers):
        _settle()
    waits.update((id(buffer), found) for buffer in found.buffers)


@contextlib.contextmanager
def waiting(modules: Iterable[nn.Module], may_go_on: bool = True) -> Iterator[None]:
    """A context at whose end the buffers of the modules are written together. Collective there.

    After an error, perhaps of this rank alone, nothing is sent. A program that may go on writes what is left at its
    next call, or when it reads a buffer.
    """
    _settle()  # first what an outer call has found so far
    modules = list(modules)
    every = list(map(operator.attrgetter("_buffers"), modules))
    chosen = list(itertools.compress(zip(modules, every, strict=True), every))
    outer = _thread.moves, _thread.buffers
    of_modules = itertools.chain.from_iterable(map(operator.methodcaller("values"), every))
    _thread.moves, _thread.buffers = {}, frozenset(map(id, of_modules))
    for module, own in chosen:
        module.__dict__["_buffers"] = _Reading(own)
    try:
        yield
        _settle()
    except _StopRecomputationError:  # a checkpoint has all that it computes again, on every rank
        _settle()
        raise
    except BaseException as error:
        plain = all(type(x) is Tensor for _, own in chosen for x in own.values() if x is not None)
        if may_go_on and plain and isinstance(error, Exception) and outer[0] is None and _thread.moves:
            _thread.left += _thread.moves.values()
            _thread.reading.update(chosen)
            chosen = []
        else:
            _settle(gather=False)
        raise
    finally:
        _thread.moves, _thread.buffers = outer
        _give_back(chosen)


def _give_back(chosen: Iterable[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, own in chosen:
        now = dict.copy(module._buffers)  # to which the module may have added, or assigned
        own.clear()
        own.update(now)
        module.__dict__["_buffers"] = own


def _settle_left() -> None:
    """Writes what calls have left that ended by an exception. Collective where there is any."""
    left, reading, _thread.left, _thread.reading = _thread.left, _thread.reading, [], {}
    _give_back(reading.items())
    _write(left)


@contextlib.contextmanager
def of_modules(buffers: Iterable[Tensor]) -> Iterator[None]:
    """A context in which these are buffers of the modules that run, too."""
    before = _thread.buffers
    _thread.buffers = before.union(map(id, buffers))
    try:
        yield
    finally:
        _thread.buffers = before


def begin_graph(buffers: Sequence[Tensor]) -> None:
    """What is traced from here on moves these buffers, which one function each reads, where ``end_graph`` is called."""
    _thread.traced = buffers, []


def end_graph() -> None:
    """Move the buffers of the graph that is traced, those of all norms by one exchange. Collective."""
    (buffers, waiting), _thread.traced = _thread.traced, ((), [])
    with _unsafe_preserve_version_counter(tuple(buffers)):  # autograd has kept them, and reads none that has moved
        _write(waiting)


def is_a_modules(buffer: Tensor) -> bool:
    """Whether a tensor is a buffer of a module that runs."""
    return id(buffer) in _thread.buffers


def can_wait(running: tuple[Tensor | None, Tensor | None]) -> TypeGuard[tuple[Tensor, Tensor]]:
    """Whether what moves running statistics may be written later.

    That is so of plain buffers of modules that run, and in a traced graph of those that nothing reads again.
    """
    of_modules = _thread.buffers
    mean, variance = running
    if type(mean) is Tensor and type(variance) is Tensor and id(mean) in of_modules and id(variance) in of_modules:
        return True  # soonest, as of most
    return all(
        (type(buffer) is Tensor and is_a_modules(buffer)) or (buffer is not None and _is_traced_last(buffer))
        for buffer in running
    )


def _is_traced_last(buffer: Tensor) -> bool:
    return any(buffer is each for each in _thread.traced[0])


class _Reading(dict[str, Any]):
    """A module's buffers while a model runs: reading one that is to be written writes all that are."""

    def __getitem__(self, name: str) -> Any:
        if _thread.reading:
            _settle_left()
        value = super().__getitem__(name)
        waits = _thread.moves
        if waits and id(value) in waits:
            _settle()
        return value

    def items(self) -> Any:
        _settle()
        return super().items()

    def values(self) -> Any:
        _settle()
        return super().values()


def _settle(gather: bool = True) -> None:
    """Write what waits."""
    if gather and _thread.reading:
        _settle_left()
    if _thread.moves:
        waiting = list(_thread.moves.values())
        _thread.moves.clear()
        _write(waiting, gather)


@torch.no_grad()
def _write(waiting: Sequence[tuple[_Move, Any] | Found | Tensor], gather: bool = True) -> None:
    """Moves buffers. Without ``gather``, only those for which nothing is sent."""
    if counted := [each for each in waiting if isinstance(each, Tensor)]:
        torch.ops.aten._foreach_add_.Scalar(counted, 1)
    moves = [each for each in waiting if not isinstance(each, Found | Tensor)]
    if gather:
        moves += _combine([each for each in waiting if isinstance(each, Found)])
    together: dict[Any, list[_Move]] = {}
    for each, sharded in moves:
        together.setdefault((sharded, each.momentum, each.value.dtype, each.value.device), []).append(each)
    for (sharded, momentum, *_), same in together.items():
        if sharded is not None and not gather:
            continue
        buffers = [each.buffer for each in same]
        values = [each.value for each in same]
        scaled = [at for at, each in enumerate(same) if each.factor != 1]
        if scaled:
            factors = [same[at].factor for at in scaled]
            products = torch.ops.aten._foreach_mul.ScalarList([values[at] for at in scaled], factors)
            for at, product in zip(scaled, products, strict=True):
                values[at] = product
        if sharded is not None:
            mesh, axes = sharded
            values = gathered(mesh, axes, values, tuple(buffer.shape[0] for buffer in buffers))
        torch.ops.aten._foreach_lerp_.Scalar(buffers, values, momentum)


def _combine(found: list[Found]) -> list[tuple[_Move, Any]]:
    """The moves of buffers, from each rank's statistics of its elements. Collective.

    Every norm is in the list twice, for its mean and for its variance.
    """
    together: dict[Any, list[Found]] = {}
    for each in {id(each): each for each in found}.values():
        counts = None if each.share.even == len(each.share.counts) else each.share.counts
        together.setdefault((each.share.group, counts, each.mean.dtype, each.mean.device), []).append(each)
    moves: list[Any] = []
    for same in together.values():
        channels = [each.mean.numel() for each in same]
        mean, variance = torch.cat([each.mean for each in same]), torch.cat([each.variance for each in same])
        whole = (values.split(channels) for values in of_all(mean, variance, same[0].share))
        for each, mean, variance in zip(same, *whole, strict=True):
            unbiased = each.share.total / max(each.share.total - 1, 1)
            for buffer, value, factor in zip(each.buffers, (mean, variance), (1.0, unbiased), strict=True):
                moves.append((_Move(buffer, value.to(buffer.dtype), each.momentum, factor), each.sharded))
    return moves
