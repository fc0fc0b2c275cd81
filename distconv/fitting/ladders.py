"""The partitions in parts that are tried for a call, the fewest parts first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distconv.settings.partition import Partition

MOST_PARTS = 32  # Along one dim; each one more costs a thread, and all operators once more.


def partition_ladders(extents: Mapping[str, int]) -> Iterator[list[Partition]]:
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
