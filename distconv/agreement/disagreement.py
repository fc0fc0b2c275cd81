"""The one-line error about what the ranks do not agree on. Pure: computed from what each rank has noted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Generic, TypeVar

C = TypeVar("C")


class Disagreement(ValueError):
    """The ranks have different tensors where one process has one; the message is one line, the same on every rank."""


@dataclass(frozen=True)
class Site:
    """A place where a whole tensor was taken to be the same on every rank.

    what: such as "input 1 of UNet.forward" or "target of aten.mse_loss".
    line: the script's line, such as "train.py:41"; "" where there is none.
    """

    what: str
    shape: tuple[int, ...]
    dtype: str
    line: str

    def __str__(self) -> str:
        return f"{self.what}, shape {self.shape}, {self.dtype}" + (f", at {self.line}" if self.line else "")


@dataclass(frozen=True)
class Note(Generic[C]):
    """A rank's note about one site: the checksum of the tensor there, and the number of the rank's shard.

    Ranks with the same shard must have the same checksum; shard 0 is the whole where a tensor is not sharded. The
    checksum is a tensor on the device where it was computed, or, once ranks exchange their notes, a number.

    within: the sites in this one, where the checksum is a list of theirs.
    """

    site: Site
    checksum: C
    shard: int = 0
    within: Sequence[Site] = ()


REMEDY = (
    "Every rank must have the whole batch and the same model: draw from generators with the same seed on every rank,"
    " and leave it to distconv to split the data. DISTCONV_CHECK=off skips this check"
)


def explain(noted: Mapping[int, Sequence[Note[int]]]) -> str | None:
    """The first thing that {rank: its notes, in order} disagree on, as one line; None where they agree."""
    for notes in zip_longest(*noted.values()):
        by_rank: dict[int, Note[int] | None] = dict(zip(noted, notes, strict=True))
        sites: dict[Site | None, list[int]] = {}
        for rank, note in by_rank.items():
            sites.setdefault(note.site if note else None, []).append(rank)
        if len(sites) > 1:
            places = "; ".join(f"{named(ranks)}: {site or 'nothing more'}" for site, ranks in sites.items())
            return f"the ranks do not do the same: next comes, on {places}. {REMEDY}"
        differ = _differing({rank: note for rank, note in by_rank.items() if note is not None})
        if differ:
            others, first = differ
            (site,), verb = sites, "differ" if len(others) > 1 else "differs"
            return f"{site}, is not the same on every rank: {named(others)} {verb} from rank {first}. {REMEDY}"
    return None


def _differing(notes: Mapping[int, Note[int]]) -> tuple[list[int], int] | None:
    """The ranks whose checksum is another than that of the first rank with the same shard, and that rank."""
    first: dict[int, int] = {}
    for rank, note in notes.items():
        first.setdefault(note.shard, rank)
    others = [rank for rank, note in notes.items() if note.checksum != notes[first[note.shard]].checksum]
    return (others, first[notes[others[0]].shard]) if others else None


def named(ranks: Iterable[int]) -> str:
    """Ranks, of which there is at least one, in words: "rank 2", "ranks 0, 1 and 3"."""
    *most, last = map(str, ranks)
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"
