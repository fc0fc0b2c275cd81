"""The desirable set: the choices that no other choice dominates in time and workspace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby
from typing import Protocol, TypeVar

from mucudnn.optimizer.option import Division, Option
from mucudnn.optimizer.reuse import Cover


class Costed(Protocol):
    """Anything with a time and a workspace: an `Option` or a `Division`."""

    @property
    def seconds(self) -> float: ...

    @property
    def workspace(self) -> int: ...


Item = TypeVar("Item", bound=Costed)


def desirable_set(items: Iterable[Item]) -> list[Item]:
    """The items that no other item dominates (mu-cuDNN, Oyama et al. 2018, section III-B).

    One item dominates another if it is at least as good in `seconds` and in `workspace` and better in one of them.
    Of items that are equal in both, the first is kept.

    Returns:
        The set in ascending workspace, therefore in strictly descending time.
    """
    kept: list[Item] = []
    for item in sorted(items, key=lambda item: (item.workspace, item.seconds)):
        if not kept or item.seconds < kept[-1].seconds:
            kept.append(item)
    return kept


def desirable_divisions(options: Iterable[Option], extent: int, dim: str = "batch") -> list[Division]:
    """The divisions of a mini-batch that no other division dominates.

    Sweeps the limit over the distinct workspaces, ascending: the fastest division within a limit belongs to the set if
    it is faster than that of the limit before. The calls that a limit adds are added to what is known, so that the
    whole sweep costs as much as one limit.

    Args:
        options: calls to choose from, of any extents, each any number of times.
        extent: the mini-batch size in samples, at least 0.
        dim: what is divided, if not the mini-batch.

    Returns:
        The set in ascending workspace, therefore in strictly descending time; of divisions equally good, one with the
        fewest parts. Empty where the options do not add up to the extent.
    """
    cover = Cover(extent, dim)
    found: list[Division] = []
    ascending = sorted(options, key=lambda option: (option.workspace, option.seconds / option.extent))
    for _, calls in groupby(ascending, key=lambda option: option.workspace):
        before = cover.seconds
        for option in calls:
            cover.add(option)
        if cover.seconds < before:
            found.append(cover.division())
    if not found and cover.seconds < math.inf:
        found.append(cover.division())  # the extent is 0: a division without calls
    return desirable_set(found)
