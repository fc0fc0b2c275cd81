"""Chooses which of the configurations that cuDNN's heuristics propose are offered, without making a plan."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from mucudnn.providers.cudnn.configuration import Configuration

MOST = 10
"""Configurations that are offered: the best ranked. Each is timed at least once, unless the cost model rules it out."""

MOST_COMPILED = 2
"""Of them, those whose engines are compiled at run time: a plan takes half a second of a processor and more."""

FIRST = 4  # A list's first proposals, of whatever engines, that are offered beside the first of each further engine.


class Proposal(NamedTuple):
    """A configuration that cuDNN proposes."""

    configuration: Configuration
    compiled: bool = False  # Whether its engine is compiled at run time.
    reason: str | None = None  # Why it may not be offered now; `None` where it may.


def ranked(lists: Iterable[Sequence[Proposal]]) -> list[Proposal]:
    """The proposals of several lists without repetition, in the order of the best rank that each has in a list."""
    ranks: dict[Proposal, int] = {}
    for proposals in lists:
        for rank, proposal in enumerate(_varied(proposals)):
            ranks[proposal] = min(rank, ranks.get(proposal, rank))
    return sorted(ranks, key=ranks.__getitem__)


def _varied(proposals: Sequence[Proposal]) -> list[Proposal]:
    """The proposals without those that differ from better ones in knobs only. `FIRST` counts those that are allowed."""
    found: list[Proposal] = []
    engines: set[int] = set()
    allowed = 0
    for proposal in proposals:
        if allowed < FIRST or proposal.configuration.engine not in engines:
            found.append(proposal)
            allowed += proposal.reason is None
        engines.add(proposal.configuration.engine)
    return found


def offered(proposals: Iterable[Proposal]) -> tuple[list[Proposal], dict[str, str]]:
    """The offered ones of ranked proposals, and by name why others are not offered."""
    found: list[Proposal] = []
    reasons: dict[str, str] = {}
    for proposal in proposals:
        name, compiled = str(proposal.configuration), sum(one.compiled for one in found)
        if proposal.reason is not None:
            reasons[name] = proposal.reason
        elif len(found) >= MOST:
            reasons[name] = f"{MOST} others are ranked higher"
        elif proposal.compiled and compiled >= MOST_COMPILED:
            reasons[name] = f"{MOST_COMPILED} others that are compiled at run time are ranked higher"
        else:
            found.append(proposal)
    return found, reasons
