"""Channel and filter parallelism: each rank's block of a layer's weight, and the channels that it exchanges.

Every rank owns 1/p of the channels of x and of y. With p ranks, C input channels and F filters there are three
algorithms, named after the tensor that stays where it is (Dryden et al., "Channel and filter parallelism for
large-scale CNN training", SC 2019, section 3):

    x   a rank has C/p x F of the weight; its part of y is a sum over its channels, added up at the owners of y
    y   a rank has C x F/p; it gathers the channels of x, in backward once more for dL/dweight
    w   C/pc x F/pf on the axes channel x filter: it gathers x over one axis and adds up y over the other

All three are the same computation: a rank has a block of the weight, which reads an interval of channels and adds to an
interval of filters. It fetches the channels that it does not own, and sends its sums for the filters that it does not
own. The weight of a grouped convolution is always sharded by its first dim, so that channels and filters move only for
groups that are split between two ranks.

Pure: numbers in, numbers out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from distconv.settings.partition import AXES, Partition, flat_index, nested_ownership, shards_channels
from mucudnn.convolution.geometry import EMPTY, Interval, intersect, length

ALGORITHMS = ("x", "y", "w", "auto")


@dataclass(frozen=True)
class ChannelMap:
    """The channels of a convolution, of a transposed one, or of a linear layer.

    Its weight is (filters, channels / groups, kernel...), of a transposed one (channels, filters / groups, kernel...).
    ``scale``: positions of y per position of x, 1/4 for a 2-D convolution of stride 2.
    """

    channels: int
    filters: int
    groups: int = 1
    transposed: bool = False
    scale: float = 1.0

    @property
    def channel_dim(self) -> int:
        """The dim of the weight over which x's channels are summed."""
        return 0 if self.transposed else 1

    @property
    def filter_dim(self) -> int:
        return 1 - self.channel_dim

    @property
    def weight(self) -> tuple[int, int]:
        """The first two extents of the weight."""
        if self.transposed:
            return self.channels, self.filters // self.groups
        return self.filters, self.channels // self.groups


@dataclass(frozen=True)
class GroupRun:
    """Groups of a convolution that one local call computes. Its intervals count from the start of the block's."""

    channels: Interval
    filters: Interval
    weight: Interval  # Along the weight's first dim.
    groups: int


@dataclass(frozen=True)
class Block:
    """A rank's block of the weight: the channels of x that it reads, and the filters of y that it adds to."""

    channels: Interval
    filters: Interval
    runs: tuple[GroupRun, ...]

    @functools.cached_property
    def every(self) -> tuple[Interval, Interval]:
        """All its channels, and all its filters, counted from its first ones."""
        return (0, length(self.channels)), (0, length(self.filters))


NOTHING = Block(EMPTY, EMPTY, ())


def block(layer: ChannelMap, box: tuple[Interval, Interval]) -> Block:
    """The block of ``box``, the intervals of the first two dims of the weight. ValueError for a part of a group."""
    if any(length(interval) == 0 for interval in box):
        return NOTHING
    channels, filters = box[layer.channel_dim], box[layer.filter_dim]
    if layer.groups == 1:
        return Block(
            channels, filters, (GroupRun((0, length(channels)), (0, length(filters)), (0, length(box[0])), 1),)
        )
    first, inside = box
    if inside != (0, layer.weight[1]):
        raise ValueError(f"part {inside} of the {layer.weight[1]} weights of each group; accepted: all of them")
    size = layer.weight[0] // layer.groups
    before, after = first[0] // size, -(-first[1] // size)
    runs: list[GroupRun] = []
    for start, stop in _whole_groups(first, size):
        groups = (stop - start) // size or 1
        outer = (start - first[0], stop - first[0])
        at = (start // size - before) * inside[1]
        inner = (at, at + groups * inside[1])
        runs.append(
            GroupRun(outer, inner, outer, groups) if layer.transposed else GroupRun(inner, outer, outer, groups)
        )
    wide = (before * inside[1], after * inside[1])
    return Block(first, wide, tuple(runs)) if layer.transposed else Block(wide, first, tuple(runs))


def _whole_groups(interval: Interval, size: int) -> list[Interval]:
    """An interval, divided where groups begin: the end of one group, whole groups, the beginning of another."""
    start, stop = interval
    low, high = -(-start // size) * size, stop // size * size
    if low > high:
        return [interval]
    return [(a, b) for a, b in ((start, low), (low, high), (high, stop)) if a < b]


def weight_boxes(layer: ChannelMap, dims: Sequence[int], sizes: Sequence[int]) -> list[tuple[Interval, Interval]]:
    """The box of the weight at each coordinate of some axes, the last running fastest, if axis i shards dims[i]."""
    cut = [tuple(size if dim == of else 1 for dim, size in zip(dims, sizes, strict=True)) for of in (0, 1)]
    first, second = (nested_ownership(extent, own) for extent, own in zip(layer.weight, cut, strict=True))
    places = []
    for coordinate in itertools.product(*(range(size) for size in sizes)):
        row, column = (flat_index((at % size for at, size in zip(coordinate, own, strict=True)), own) for own in cut)
        places.append((first[row], second[column]))
    return places


def _fetched(owned: Sequence[Interval], needed: Sequence[Interval]) -> int:
    return sum(length(b) - length(intersect(a, b)) for a, b in zip(owned, needed, strict=True))


@functools.lru_cache(maxsize=4096)
def moved_channels(layer: ChannelMap, dims: tuple[int, ...], sizes: tuple[int, ...]) -> tuple[int, int]:
    """Positions of the channels of x, and of y, that all ranks together receive in one fetch, or send in one sum.

    Axis i, of sizes[i] ranks, shards the weight by dims[i] and the channels of x and y.
    """
    blocks = [block(layer, box) for box in weight_boxes(layer, dims, sizes)]
    channels = _fetched(nested_ownership(layer.channels, sizes), [one.channels for one in blocks])
    return channels, _fetched(nested_ownership(layer.filters, sizes), [one.filters for one in blocks])


def cost(layer: ChannelMap, dims: tuple[int, ...], sizes: tuple[int, ...]) -> float:
    """What a training step moves, in elements per sample and position of x.

    x is fetched for forward and for dL/dweight and dL/dx added up; y is added up, and dL/dy fetched.
    """
    channels, filters = moved_channels(layer, dims, sizes)
    return 3 * channels + 2 * filters * layer.scale


def weight_dims(layer: ChannelMap, algorithm: str, axes: Mapping[str, int]) -> tuple[int, ...]:
    """The dim of the weight that each of the axes {name: ranks} shards; ``auto`` is the algorithm that moves least.

    An axis that is neither ``channel`` nor ``filter`` but shards channels, as after a flatten, goes as ``channel``.
    """
    return _weight_dims(layer, algorithm, tuple(axes), tuple(axes.values()))


@functools.lru_cache(maxsize=4096)
def _weight_dims(layer: ChannelMap, algorithm: str, names: tuple[str, ...], sizes: tuple[int, ...]) -> tuple[int, ...]:
    if layer.groups > 1:
        return (0,) * len(names)
    choices = {
        "x": (layer.channel_dim,) * len(names),
        "y": (layer.filter_dim,) * len(names),
        "w": tuple(layer.filter_dim if name in AXES and AXES[name].of_filters else layer.channel_dim for name in names),
    }
    if algorithm != "auto":
        return choices[algorithm]
    return min(choices.values(), key=lambda dims: cost(layer, dims, sizes))


def check_algorithm(algorithm: str, partition: Partition) -> str:
    """Returns the algorithm. ValueError, one line, for an unknown one, and for ``w`` without the two axes it needs."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"channel algorithm {algorithm!r}: accepted: {', '.join(ALGORITHMS)}")
    of_filters = {AXES[name].of_filters for name in partition.names if shards_channels(name)}
    if algorithm == "w" and of_filters != {False, True}:
        raise ValueError(
            f"channel algorithm 'w' on partition {str(partition)!r}: accepted with axes channel and filter"
        )
    return algorithm
