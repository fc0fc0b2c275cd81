"""Cuts the batches of indices of a batch sampler to the samples that this rank reads."""

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

from distconv.job.sample_statistics import SampleStatistics
from distconv.job.supply import Cut, Supply
from distconv.reading.draft import Order
from distconv.reading.share import Share

_DRAWN_AT_ONCE = (
    *(RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
    *(list, tuple, range),
)
"""Samplers that draw no random numbers after the first sample: one batch more may be drawn from them ahead."""


class OwnIndices:
    """A batch sampler's batches, each cut to this rank's interval. `cuts` describes the batches still to be made."""

    def __init__(
        self,
        loader: DataLoader[Any],
        batches: Any,
        share: Share,
        number: int,
        supply: Supply | None,
        statistics: SampleStatistics | None,
    ) -> None:
        self._batches, self._share, self._supply, self._statistics = batches, share, supply, statistics
        self.number = number  # The number of the data set.
        self._dataset, self._looks_ahead = loader.dataset, supply is not None and not loader.num_workers
        self.cuts: deque[Cut] = deque()

    def __len__(self) -> int:
        batches: Sized = self._batches
        return len(batches)

    def __iter__(self) -> Iterator[Sequence[Any]]:
        self.cuts.clear()
        seen = map(self._seen, self._batches)
        return _one_ahead(seen) if self._looks_ahead and _is_drawn_at_once(self._batches) else seen

    def _seen(self, batch: Sequence[Any]) -> Sequence[Any]:
        own = self._share.portion(batch)
        supply = self._supply
        indices = str(list(batch))
        cut = Cut(len(batch), indices) if supply is None else supply.cut(self.number, batch, self._of_epoch(len(batch)))
        self.cuts.append(cut)
        if supply is None and self._statistics is None:
            return own
        known = {} if self._statistics is None else self._statistics.known(self.number, own)
        return Order(own, read=supply is None or not supply.is_known(cut), known=known)

    def _of_epoch(self, count: int) -> int:
        known = []
        with contextlib.suppress(TypeError, NotImplementedError):
            known.append(len(self) * count)
        with contextlib.suppress(TypeError, NotImplementedError):
            known.append(len(self._dataset))  # type: ignore[arg-type]
        return min(known, default=count)


def _one_ahead(batches: Iterable[Sequence[Any]]) -> Iterator[Sequence[Any]]:
    """Yields batches one step late: each is drawn before the one ahead of it is given out."""
    before: list[Sequence[Any]] = []
    for batch in batches:
        yield from before
        before = [batch]
    yield from before


def _is_drawn_at_once(batches: Any) -> bool:
    if type(batches) is BatchSampler:
        batches = batches.sampler
    return type(batches) in _DRAWN_AT_ONCE
