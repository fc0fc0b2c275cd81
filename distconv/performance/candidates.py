"""The partitions that a layer may have: every way to divide the ranks over the axes of its data."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

import numpy as np

from distconv.performance.layers import Layer, LayerGraph
from distconv.settings.partition import AXES, Kind, Partition
from mucudnn.spelling import meant

MOST = 40  # Partitions that are looked at in detail, by default.


def partitions(ranks: int, ndim: int, axes: Sequence[str] | None = None) -> list[Partition]:
    """All partitions of a number of ranks along the axes of data of ``ndim`` dims, (N, C, spatial...).

    Channels and filters are one dim of activations. Which dim of a weight is divided is the channel algorithm's
    choice, for each layer one of its own: with the axis ``channel`` alone x or y, with ``filter`` beside it w as well.
    ``filter`` alone would be the same as ``channel`` alone. Axes that get one rank are left out; of one rank it is
    ``sample=1``.

    ``axes``: the names of those that may be divided; all, if not given.

    Raises:
        ValueError: one line, for a name that is no axis, or none of this data.
    """
    known = [name for name, axis in AXES.items() if axis.dim_of(ndim) is not None]
    for name in axes or ():
        if name not in known:
            raise ValueError(f"axis {name!r}{meant(name, known)}; accepted for {ndim - 2}-D data: {', '.join(known)}")
    names = [name for name in known if axes is None or name in axes]
    found = []
    for sizes in _factors(ranks, len(names)):
        shares = tuple((name, size) for name, size in zip(names, sizes, strict=True) if size > 1)
        channels = {AXES[name].of_filters for name, _ in shares if AXES[name].kind is Kind.CHANNELS}
        if channels != {True}:
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
        left = [*shape]
        for name, size in partition.axes:
            dim = AXES[name].dim_of(len(shape))
            if dim is not None:
                left[dim] //= size
                if not left[dim]:
                    return False
    return True


def worthwhile(graph: LayerGraph, found: Sequence[Partition], most: int = MOST) -> list[Partition]:
    """The partitions that together promise most; in the order given. Those that fit no layer are left out.

    What a layer takes under a partition is measured by its largest shard and what other ranks send it: its surface
    along divided dims of space, and along an axis of channels the shards of all others; by the whole layer where the
    partition does not fit it. The first partition taken is the one with the least sum over the layers. Each further one
    is that which lowers most the sum of what every layer takes under the best partition so far (the greedy choice of
    k medians), so that early layers find theirs as well as late ones.
    """
    shapes = Counter((layer.input, layer.output) for layer in graph.layers.values())
    layers = {shape: next(one for one in graph.layers.values() if (one.input, one.output) == shape) for shape in shapes}
    fitting = [p for p in found if any(fits(layer, p) for layer in layers.values())]
    if not fitting:
        return []
    taken = np.array([[_taken(layer, p) * shapes[shape] for shape, layer in layers.items()] for p in fitting])
    best, chosen = np.full(taken.shape[1], np.inf), np.zeros(len(fitting), dtype=bool)
    for _ in range(min(most, len(fitting))):
        # Where no other one lowers the sum, the next best for all layers.
        sums = np.minimum(taken, best).sum(axis=1)
        order = np.lexsort((taken.sum(axis=1), sums))
        at = next(index for index in order if not chosen[index])
        chosen[at] = True
        best = np.minimum(best, taken[at])
    return [partition for partition, wanted in zip(fitting, chosen, strict=True) if wanted]


def _taken(layer: Layer, partition: Partition) -> float:
    """Elements of a layer's input that are local to a rank or received."""
    if not fits(layer, partition):
        return float(math.prod(layer.input))
    local = [*layer.input]
    axes = []
    for name, size in partition.axes:
        dim = AXES[name].dim_of(len(local))
        if dim is not None:
            local[dim] = -(-local[dim] // size)
            axes.append((AXES[name].kind, dim, size))
    shard = math.prod(local)
    return shard + sum(
        (size - 1) * shard if kind is Kind.CHANNELS else 2 * shard / local[dim]
        for kind, dim, size in axes
        if kind is not Kind.SAMPLES
    )


def allowed(only: str | None, without: str | None, found: Sequence[Partition]) -> list[Partition]:
    """The partitions whose text one shell pattern matches and another one does not.

    Raises:
        ValueError: one line, where that is none.
    """
    kept = [partition for partition in found if only is None or fnmatchcase(str(partition), only)]
    if not kept:
        raise ValueError(f"--only {only!r} matches none of {len(found)} partitions, such as {found[0]}")
    left = [partition for partition in kept if without is None or not fnmatchcase(str(partition), without)]
    if not left:
        raise ValueError(f"--without {without!r} matches all of {len(kept)} partitions, such as {kept[0]}")
    return left
