"""A batch sampler's batches, each cut to what one rank makes of it."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from distconv.job.supply import Cut, Supply
from distconv.reading.draft import ordered
from distconv.reading.share import Share

_DRAWN_AT_ONCE = (
    *(RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(list, tuple, range),
)
"""Samplers that draw from nobody else's random numbers after the first sample: one batch more may be asked of them."""


class OwnIndices:
    """A batch sampler's batches, each cut to this rank's interval; `cuts` tells what those to come were."""

    def __init__(self, loader: DataLoader[Any], batches: Any, share: Share, supply: Supply | None) -> None:
        self._batches, self._share, self._supply = batches, share, supply
        self._dataset, self._looks_ahead = loader.dataset, supply is not None and not loader.num_workers
        self.cuts: deque[Cut] = deque()

    def __len__(self) -> int:
        batches: Sized = self._batches
        return len(batches)

    @property
    def number(self) -> int:
        """Of the data set, for a supply."""
        return 0 if self._supply is None else self._supply.number(self._dataset)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.cuts.clear()
        seen = map(self._seen, self._batches)
        return _one_ahead(seen) if self._looks_ahead and _is_drawn_at_once(self._batches) else seen

    def _seen(self, batch: Sequence[Any]) -> Sequence[Any]:
        own = self._share.portion(batch)
        if self._supply is None:
            self.cuts.append(Cut(len(batch), str(list(batch))))
            return own
        cut = self._supply.cut(self.number, batch, self._of_epoch(len(batch)))
        self.cuts.append(cut)
        return ordered(own, read=not self._supply.is_known(cut))

    def _of_epoch(self, count: int) -> int:
        known = []
        with contextlib.suppress(TypeError, NotImplementedError):
            known.append(len(self) * count)
        with contextlib.suppress(TypeError, NotImplementedError):
            known.append(len(self._dataset))  # type: ignore[arg-type]
        return min(known, default=count)


def _one_ahead(batches: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """The same, of which the one after is known when one is given."""
    before: list[Sequence[Any]] = []
    for batch in batches:
        yield from before
        before = [batch]
    yield from before


def _is_drawn_at_once(batches: Any) -> bool:
    if type(batches) is BatchSampler:
        batches = batches.sampler
    return type(batches) in _DRAWN_AT_ONCE
