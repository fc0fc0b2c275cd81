"""Chooses the parts of a call in turn that keep within a limit of memory and move the least."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from distconv.model.direct.chains.choice import Prices
from distconv.settings.partition import Partition
from distconv.turns.following import Followed

MOST_PARTS = 32  # Along one dim; each one more costs a thread, and all operators once more.

GAIN = 0.95
"""More parts are tried while they take at most this share of what fewer take: memory, or within the limit moves."""

SLACK = 1.05
"""Tensors may exceed a limit by this factor: the limit does not count small tensors, which stay on the device."""

Follow = Callable[[Partition, bool], Followed]
"""The memory and moves of a call under a partition; the second argument is whether its layers compute in chains."""


@dataclass(frozen=True)
class PartsChoice:
    """The parts of a call."""

    partition: Partition | None  # None, where one process keeps within the limit.
    taken: Followed  # What the call takes in these parts.
    fits: bool  # Whether ``taken`` keeps within the limit; else it is what takes the least memory.
    chained: bool = False  # Whether the layers are computed in chains.


def choose_parts(
    alone: Followed, follow: Follow, extents: Mapping[str, int], memory: int, prices: Prices | None = None
) -> PartsChoice:
    """The parts that keep a call within a limit, by what it takes under each of a few partitions.

    One process is best, where it fits. Otherwise samples are cut, or else the longest dim of space by which the call
    fits the limit. Of the numbers of parts that fit, the best one moves the fewest bytes off the device and
    back, then the fewest between parts, and is the smallest. Where nothing fits, what exceeds the limit least is taken.
    Layers are computed in chains if that saves more seconds of moved bytes than it adds of repeated operations.

    Args:
        alone: what the call takes in one process.
        follow: is asked for one partition at a time.
        extents: those of the dims that can be cut, by the axis that cuts them.
        memory: the most bytes of tensors on the device, besides parameters, buffers, inputs and results.
        prices: of what chains save and add; None: chains are not considered.
    """
    found: list[tuple[Partition | None, Followed]] = [(None, alone)]
    if not _fits(alone, memory):
        for ladder in ladders(extents):
            climbed = _climb(follow, ladder, memory)
            found += climbed
            if any(_fits(taken, memory) for _, taken in climbed):
                break
    partition, taken = min(found, key=lambda each: _cost(each[0], each[1], memory))
    chained = False
    if prices is not None and partition is not None and taken.moved:
        in_chains = follow(partition, True)
        faster = _seconds(in_chains, prices) < _seconds(taken, prices)
        chained = faster and _over(in_chains, memory) <= _over(taken, memory)
        taken = in_chains if chained else taken
    return PartsChoice(partition, taken, _fits(taken, memory), chained)


def _seconds(taken: Followed, prices: Prices) -> float:
    """Seconds of the work that differs with and without chains."""
    return (taken.moved + taken.exchanged) * prices.received + taken.operations * prices.operation


def ladders(extents: Mapping[str, int]) -> Iterator[list[Partition]]:
    """Lists of partitions of 2, 4, 8... parts: of samples, which exchange the least; of the longest dim; of both."""
    samples = _counts(extents.get("sample", 1))
    yield [Partition((("sample", parts),)) for parts in samples]
    space = [name for name in extents if name != "sample"]
    if space:
        name = max(space, key=extents.__getitem__)
        yield [Partition(((name, parts),)) for parts in _counts(extents[name])]
        if samples:
            yield [Partition((("sample", samples[-1]), (name, parts))) for parts in _counts(extents[name])]


def _counts(extent: int) -> list[int]:
    doubled = [1 << k for k in range(1, 6) if 1 << k <= min(extent, MOST_PARTS)]
    return sorted({*doubled, extent}) if 1 < extent <= MOST_PARTS else doubled


def _climb(follow: Follow, ladder: list[Partition], memory: int) -> list[tuple[Partition, Followed]]:
    """The partitions of a list with their costs, up to the first one on which later ones cannot improve."""
    found: list[tuple[Partition, Followed]] = []
    for partition in ladder:
        taken = follow(partition, False)
        gains = not found or _gains(found[-1][1], taken, memory)
        found.append((partition, taken))
        if not gains or (_fits(taken, memory) and not taken.moved):
            break
    return found


def _gains(fewer: Followed, more: Followed, memory: int) -> bool:
    """Whether more parts take so much less than fewer that even more may be better."""
    if not _fits(more, memory):
        return more.limited <= GAIN * fewer.limited
    return not _fits(fewer, memory) or more.moved <= GAIN * fewer.moved


def _fits(taken: Followed, memory: int) -> bool:
    return _over(taken, memory) == 0


def _over(taken: Followed, memory: int) -> int:
    """Bytes beyond the limit."""
    return max(0, taken.limited - int(SLACK * memory))


def _cost(partition: Partition | None, taken: Followed, memory: int) -> tuple[int, int, int, int]:
    return _over(taken, memory), taken.moved, taken.exchanged, 1 if partition is None else partition.ranks
