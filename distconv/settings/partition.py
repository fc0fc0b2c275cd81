"""Partitions: from ``"sample=2,height=2"`` to mesh axes, and to the interval of a dim that each rank owns.

An *axis* belongs to the mesh, a *dim* to a tensor. The table `AXES` says which dim each axis shards. Layouts are
DTensor's canonical ones: shards of the extent divided by the ranks and rounded up, the last ones smaller or empty.
Nothing here needs torch, which takes seconds to import: the launcher reads partitions before it starts ranks.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from mucudnn.sizes import parse_bytes
from mucudnn.spelling import meant

Interval = tuple[int, int]


class Kind(Enum):
    """The dims of activations (N, C, spatial...) that an axis of the mesh shards."""

    SAMPLES = "samples"
    CHANNELS = "channels"
    SPACE = "space"


@dataclass(frozen=True)
class Axis:
    """One axis that a mesh may have."""

    name: str  # What a partition calls it.
    kind: Kind  # What it shards.
    dim: int  # The dim of activations that it shards; a dim of space is counted from the end, -1 being the last.
    of_filters: bool = False
    """Of an axis that shards channels, whether the algorithm "w" shards the weight's filters along it, and not its
    channels (see `distconv.settings.channels`)."""

    def dim_of(self, ndim: int) -> int | None:
        """The dim that it shards of a tensor of ``ndim`` dims; None where the tensor has no such dim.

        Tensors of fewer than 3 dims have no space, those of fewer than 2 no channels.
        """
        if self.kind is Kind.SPACE:
            return ndim + self.dim if ndim + self.dim >= 2 else None
        return self.dim if self.dim < ndim else None


AXES = {
    axis.name: axis
    for axis in (
        Axis("sample", Kind.SAMPLES, 0),
        Axis("channel", Kind.CHANNELS, 1),
        Axis("filter", Kind.CHANNELS, 1, of_filters=True),
        Axis("depth", Kind.SPACE, -3),
        Axis("height", Kind.SPACE, -2),
        Axis("width", Kind.SPACE, -1),
    )
}
"""Every axis that a mesh may have, by its name. A new one is a row here."""


def shards_channels(name: str) -> bool:
    """Whether the axis of this name shards the channels of activations, and so the weights."""
    return name in AXES and AXES[name].kind is Kind.CHANNELS


def shards_data(names: Iterable[str]) -> bool:
    """Whether one of the named axes shards a model's inputs: samples or space."""
    return any(AXES[name].kind is not Kind.CHANNELS for name in names)


@dataclass(frozen=True)
class Partition:
    """Named mesh axes and their sizes, in the order given."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def parse(cls, text: str, counted: str = "ranks") -> Partition:
        """Read ``"axis=ranks,axis=ranks"``; ValueError, one line, for anything else.

        ``counted``: what the message says is counted, "ranks" or "parts".
        """

        def refuse(what: str) -> ValueError:
            subject = "partition" if counted == "ranks" else counted
            names = ", ".join(name for name in AXES if counted == "ranks" or not shards_channels(name))
            accepted = f"axis={counted},... with axes {names} (1-D data has width)"
            return ValueError(f"{subject} {text!r}: {what}; accepted: {accepted}")

        axes: list[tuple[str, int]] = []
        for item in text.split(","):
            name, equals, count = (part.strip() for part in item.partition("="))
            if not equals:
                raise refuse(f"{item.strip()!r} is not axis={counted}")
            if name not in AXES:
                raise refuse(f"unknown axis {name!r}{meant(name, AXES)}")
            if name in dict(axes):
                raise refuse(f"axis {name!r} appears twice")
            if not (count.isascii() and count.isdigit()) or int(count) < 1:
                raise refuse(f"{count!r} is not a number of {counted}, 1 or more")
            axes.append((name, int(count)))
        return cls(tuple(axes))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.axes)

    @property
    def ranks(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.sizes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes)


def flat_index(place: Iterable[int], sizes: Iterable[int]) -> int:
    """The number of a place in a grid of these sizes, whose last axis runs fastest."""
    index = 0
    for at, size in zip(place, sizes, strict=True):
        index = index * size + at
    return index


@functools.lru_cache(maxsize=4096)
def ownership(extent: int, ranks: int) -> tuple[Interval, ...]:
    """The interval of a dim of ``extent`` that each of ``ranks`` owns under ``Shard``."""
    size = -(-extent // ranks)
    return tuple((min(rank * size, extent), min((rank + 1) * size, extent)) for rank in range(ranks))


@functools.lru_cache(maxsize=4096)
def nested_ownership(extent: int, sizes: tuple[int, ...]) -> tuple[Interval, ...]:
    """The interval that each rank owns where several axes shard a dim, the later ones within the shards of the earlier.

    By coordinate on the axes, the last one running fastest.
    """
    owned: tuple[Interval, ...] = ((0, extent),)
    for ranks in sizes:
        owned = tuple((a + x, a + y) for a, b in owned for x, y in ownership(b - a, ranks))
    return owned


ACCEPTED = ", ".join(axis.name for axis in AXES.values() if axis.kind is not Kind.CHANNELS)


def read_parts(text: str | Partition, what: str = "parts") -> Partition:
    """The partition of parts in turn, or of the ranks that compute them. ValueError, one line, for axes that cut
    parameters, which all parts share."""
    counted = "parts" if what == "parts" else "ranks"
    partition = text if isinstance(text, Partition) else Partition.parse(text, counted)
    unknown = [name for name in partition.names if AXES[name].kind is Kind.CHANNELS]
    if unknown:
        raise ValueError(
            f"{what} {str(partition)!r}: the axis {unknown[0]!r} would cut parameters, which parts in turn share;"
            f" accepted: axis={counted},... with axes {ACCEPTED} (1-D data has width)"
        )
    return partition


def read_memory(memory: str | float | None) -> int | None:
    """Bytes. ValueError, one line, for anything else."""
    if memory is None:
        return None
    try:
        limit = parse_bytes(memory)
    except ValueError:
        raise ValueError(f"memory {memory!r}: accepted: bytes, such as 8GiB or 500MB") from None
    return None if limit == math.inf else int(limit)


def together(ranks: Partition, parts: Partition) -> Partition:
    """The partition of all parts of all ranks; along an axis of both, each rank's interval is cut into its parts."""
    sizes = dict(ranks.axes)
    for name, size in parts.axes:
        sizes[name] = sizes.get(name, 1) * size
    return Partition(tuple(sizes.items()))


def numbers(ranks: Partition, parts: Partition) -> list[int]:
    """The parts of all ranks in the order of `together`, its last axis running fastest.

    Parts are numbered rank by rank, and within a rank in the order of its own partition.
    """
    names = together(ranks, parts).names
    outer, inner = dict(ranks.axes), dict(parts.axes)
    found = []
    for place in itertools.product(*(range(outer.get(name, 1) * inner.get(name, 1)) for name in names)):
        at = dict(zip(names, place, strict=True))
        rank = flat_index((at[name] // inner.get(name, 1) for name in ranks.names), ranks.sizes)
        part = flat_index((at[name] % size for name, size in parts.axes), parts.sizes)
        found.append(rank * parts.ranks + part)
    return found
