"""The parts that a process computes in turn: their notation, and their layout over the ranks of a job.

Nothing here needs torch: the launcher reads parts before it starts ranks.
"""

from __future__ import annotations

import itertools
import math

from distconv.settings.partition import AXES, Kind, Partition, flat_index
from mucudnn.sizes import parse_bytes

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
            f" accepted: axis={counted},... with axes {ACCEPTED}"
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
