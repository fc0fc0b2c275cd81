"""Networks of the campaign as `--memory` runs them: each kind of call in a way that is drawn among all."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.campaign.networks import Case
from distconv.fitting import moving
from distconv.fitting.beside import Chosen, Others
from distconv.fitting.called import Limit
from distconv.fitting.choice import Fit
from distconv.fitting.models import Fitting
from distconv.fitting.ranks import Ranks
from distconv.model.direct.chains.call import PRICES
from distconv.model.direct.chains.choice import Prices
from distconv.settings.partition import Partition
from distconv.turns import pager, part_recorder, simulated_memory
from distconv.turns.turning import script_in_turn, turn

MOVED = 1e-12, 1e-6
"""Seconds of a moved byte: less than anything else takes, so that tensors leave, or more, so that backward computes
segments again."""

SHARES = 0.3, 0.9  # Of what the whole call takes, limits are drawn in between.


SMALL: tuple[tuple[Any, str, Any], ...] = (
    *((module, "least_within", lambda limit: 64) for module in (pager, simulated_memory)),
    (part_recorder, "LEAST", 64),
    (moving, "USUAL", 64),
)
"""Modules that leave small tensors where they are, with what says so and its value for the campaign."""


def let_small_leave() -> None:
    """Lets tensors of 64 bytes and more leave the memory, as those of the campaign are small."""
    for module, name, value in SMALL:
        setattr(module, name, value)


def without_channels(case: Case) -> Case:
    """The case under a partition of samples and space alone, eager, as a script."""
    axes = [axis for axis in case["partition"].split(",") if not axis.startswith(("channel", "filter"))]
    partition = ",".join(axes) or ("sample=2", "width=3")[case["seed"] % 2]
    ranks = Partition.parse(partition).ranks
    return case | {"partition": partition, "ranks": ranks, "compiled": "", "way": "script", "algorithm": "auto"}


class PricedLimit(Limit):
    """A limit that measures no prices.

    Attributes:
        received: the seconds to move a byte.
    """

    received = 0.0

    def prices(self, *_: Any) -> Prices:
        return replace(PRICES["cpu"], received=self.received)


def priced(limit: Limit, received: float) -> PricedLimit:
    """A limit with a fixed price: ``received`` seconds to move a byte."""
    found = PricedLimit(*limit)
    found.received = received
    return found


class DrawnWays(Fitting):
    """Draws limits, and a way for each kind of call, whether it keeps within the limit or not.

    Attributes:
        taken: the ways, as they are reported.
    """

    def __init__(self, seed: int, ranks: Ranks | None = None) -> None:
        super().__init__("1GiB", ranks)
        self._random, self.taken = Random(f"ways of {seed}"), list[str]()
        self._limit = priced(self._limit, self._random.choice(MOVED))
        self.shown = lambda *_: None  # so that all ways are found

    def _fit(self, call: Any, others: Others, most: float = float("inf")) -> Chosen:
        timeline = call.timeline(self._limit)
        if timeline is None:
            self.taken.append("whole, not followed")
            return Chosen(Fit(0, 1.0), most, guessed=call.asked.guessed)
        guessed = call.asked.guessed
        limit = self._random.uniform(*SHARES) * max(timeline.alive(), default=timeline.initial)
        found = self._random.choice(self._ways(call, timeline, limit))
        self.taken.append(str(found))
        return Chosen(found, limit, others, guessed=guessed)


def kind_of(way: str) -> str:
    """A way without its numbers."""
    return re.sub(r"\d+|(?<=parts )\S+", "N", way).replace("segments", "segment").replace("keeps", "keep")


def fitted(case: Case, model: nn.Module) -> DrawnWays:
    """Lets a model compute in one process in ways that its case draws."""
    found = DrawnWays(case["seed"])
    turn(model, (found, None), None, "distconv.fit")
    return found


@contextlib.contextmanager
def ranks_fitted(case: Case, mesh: DeviceMesh) -> Iterator[None]:
    """A context in which the models of ranks compute in ways that their case draws; every rank must enter it."""
    let_small_leave()
    found = DrawnWays(case["seed"], Ranks(Partition.parse(case["partition"]), mesh))
    with script_in_turn((found, None), ranks=mesh):
        yield
