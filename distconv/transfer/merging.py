"""Chooses which collectives of a graph are merged: those of one kind, none of which needs another one's result.

Every rank chooses the same, from the dependencies of all ranks together: a rank with an empty shard computes nothing
from its messages, so that in its own graph its collectives would not depend on each other. Computes with numbers only.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Collective(NamedTuple):
    """One collective of a graph. Collectives are numbered in the order of the graph."""

    kind: Hashable  # Only collectives of one kind can be merged.
    size: int  # Bytes that it moves, the most of any rank.
    dependencies: int  # A bit for every collective that it needs the result of, on any rank.


def merged(collectives: Sequence[Collective], most: int) -> list[list[int]]:
    """The collectives in the order in which they are to run, in lists of those that are merged.

    A collective joins the latest one of its kind that it does not depend on, if they move at most ``most`` bytes.
    """
    places: list[int] = []  # by collective: the merged one that it belongs to
    members: list[list[int]] = []
    sizes: list[int] = []
    needed: list[int] = []  # by merged one: a bit for every merged one that it needs the result of
    for index, (kind, size, dependencies) in enumerate(collectives):
        direct = _mapped(dependencies, places)
        earlier = _closure(direct, needed)
        joined = [
            place
            for place, own in enumerate(members)
            if collectives[own[0]].kind == kind and not earlier >> place & 1 and sizes[place] + size <= most
        ]
        if joined:
            place = max(joined, key=lambda place: members[place][-1])
            members[place].append(index)
            sizes[place] += size
            needed[place] |= direct
        else:
            place = len(members)
            members.append([index])
            sizes.append(size)
            needed.append(direct)
        places.append(place)
    return [members[place] for place in _in_order(needed)]


def _bits(number: int) -> list[int]:
    return [place for place in range(number.bit_length()) if number >> place & 1]


def _mapped(dependencies: int, places: Sequence[int]) -> int:
    found = 0
    for index in _bits(dependencies):
        found |= 1 << places[index]
    return found


def _closure(direct: int, needed: Sequence[int]) -> int:
    """The direct and the indirect dependencies."""
    found, left = 0, direct
    while left:
        found |= left
        more = 0
        for place in _bits(left):
            more |= needed[place]
        left = more & ~found
    return found


def _in_order(needed: Sequence[int]) -> list[int]:
    """The numbers of all merged collectives, each after its dependencies, otherwise in ascending order."""
    done, found = 0, []
    waiting = list(range(len(needed)))
    while waiting:
        place = next(place for place in waiting if not needed[place] & ~done)
        done |= 1 << place
        found.append(place)
        waiting.remove(place)
    return found
