"""The partitions that a layer may have: all ways to divide the ranks over the axes of its data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from distconv.partition import AXES, Kind, Partition
from distconv.performance.layers import Layer, LayerGraph

MOST = 40
"""Partitions that are looked at in detail, unless told otherwise."""


def partitions(ranks: int, ndim: int, axes: Sequence[str] | None = None) -> list[Partition]:
    """Every partition of so many ranks along the axes of data of ``ndim`` dims, (N, C, spatial...).

    Channels and filters are one dim of activations, so that only the axis ``channel`` divides it; the channel algorithm
    chooses for each layer what that does to the weight. Axes that get one rank are left out; of one rank it is
    ``sample=1``.

    Args:
        axes: the names of those that may be divided; all, if not given.

    Raises:
        ValueError: one line, for a name that is no axis, or none of this data.
    """
    known = [name for name, axis in AXES.items() if not axis.of_filters and axis.dim_of(ndim) is not None]
    for name in axes or ():
        if name not in known:
            raise ValueError(f"axis {name!r}: accepted for {ndim - 2}-D data: {', '.join(known)}")
    names = [name for name in known if axes is None or name in axes]
    found = []
    for sizes in _factors(ranks, len(names)):
        shares = tuple((name, size) for name, size in zip(names, sizes, strict=True) if size > 1)
        found.append(Partition(shares or ((names[0], 1),)))
    return found


def _factors(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of ``count`` numbers in order."""
    if count == 1:
        yield (number,)
        return
    for first in range(number, 0, -1):
        if number % first == 0:
            for rest in _factors(number // first, count - 1):
                yield (first, *rest)


def fits(layer: Layer, partition: Partition) -> bool:
    """Whether every rank has something to do along every axis that the layer's data has."""
    for shape in (layer.input, layer.output):
        for name, size in partition.axes:
            dim = AXES[name].dim_of(len(shape))
            if dim is not None and shape[dim] < size:
                return False
    return True


def worthwhile(graph: LayerGraph, found: Sequence[Partition], most: int = MOST) -> list[Partition]:
    """The partitions that promise most, by how evenly and how thickly they cut the layers; in the order given.

    A partition's promise is the sum over the layers that it fits of its largest shard and of what lies at the cuts:
    a layer's surface along divided dims of space, and all of it where channels are divided. Partitions that fit no
    layer are left out.
    """

    def promise(partition: Partition) -> tuple[int, float]:
        misfits, volume = 0, 0.0
        for layer in graph.layers.values():
            if not fits(layer, partition):
                misfits += 1
                volume += math.prod(layer.input)
                continue
            local = [*layer.input]
            kinds = []
            for name, size in partition.axes:
                dim = AXES[name].dim_of(len(local))
                if dim is not None:
                    local[dim] = -(-local[dim] // size)
                    kinds.append((AXES[name].kind, dim))
            shard = math.prod(local)
            cuts = sum(
                shard if kind is Kind.CHANNELS else 2 * shard / local[dim]
                for kind, dim in kinds
                if kind is not Kind.SAMPLES
            )
            volume += shard + cuts
        return misfits, volume

    fitting = [p for p in found if any(fits(layer, p) for layer in graph.layers.values())]
    best = sorted(fitting, key=lambda partition: promise(partition)[1])[:most]
    return [partition for partition in found if partition in best]


def allowed(pattern: str | None, found: Sequence[Partition]) -> list[Partition]:
    """Those whose text a pattern as of the shell matches.

    Raises:
        ValueError: one line, where that is none.
    """
    if pattern is None:
        return list(found)
    kept = [partition for partition in found if fnmatchcase(str(partition), pattern)]
    if not kept:
        raise ValueError(f"--only {pattern!r} matches none of {len(found)} partitions, such as {found[0]}")
    return kept
