"""A call of a model that is to keep within a limit of memory: to find how, it is followed, whole and in parts."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from distconv import settings
from distconv.fitting.choice import Fit, largest_within, ways_to_fit, with_others
from distconv.fitting.following import AS_FOLLOWED, followed
from distconv.fitting.prices import MOST as MOST_MOVED
from distconv.fitting.prices import measured_prices
from distconv.fitting.retention import caller_retaining
from distconv.fitting.sharded_parameters import sharded_bytes
from distconv.fitting.timeline import Timeline
from distconv.fitting.ways import SegmentWay
from distconv.model.direct.chains.choice import Prices
from distconv.settings.partition import Partition
from distconv.tensors.gathering.memory import free_here
from distconv.turns.asked_numbers import AskedNumbers
from distconv.turns.following import StateBefore
from distconv.turns.gradients import BUCKET_BYTES
from distconv.turns.one_part import parts_within
from distconv.turns.parts import stacks_of
from distconv.turns.work import Followed
from mucudnn.lazily import uncollected
from mucudnn.process import print_line
from mucudnn.timing.progress import bar

BESIDE = 24 << 20  # Bytes of a processor's free memory for the plans of parts and their threads.


class Limit(NamedTuple):
    """A limit of memory. ``text``: as the program has given it; ``bytes``: None for the free memory."""

    text: str
    bytes: float | None

    def report(self, module: nn.Module, what: str) -> None:
        """Prints a line on a model."""
        print_line(f"distconv: --memory {self.text}: {type(module).__name__} {what}")

    def cannot_follow(self, module: nn.Module, what: str, error: Exception) -> None:
        """Reports why a model could not be followed, and what comes of it."""
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self.report(module, f"{what}, as it cannot be followed: {why}")

    def prices(self, module: nn.Module, device: str) -> Prices:
        """The prices of a device, measured for the type of a model's parameters."""
        dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
        sixteenth = int(min(free_here(device) if self.bytes is None else self.bytes, 1 << 40)) // 16
        size = min(MOST_MOVED, 1 << max(sixteenth.bit_length() - 1, 20))
        return measured_prices(device, dtypes[0] if dtypes else torch.float32, size)


@dataclass(eq=False)
class Call:
    """A call of a model.

    Attributes:
        inputs: the tensors among its arguments.
        trained: whether autograd records it.
        asked: what answers where the model asks for numbers while it is followed.
        partition: the ranks that compute the call; None: one process does.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    inputs: Sequence[Tensor]
    device: str
    trained: bool
    asked: AskedNumbers
    partition: Partition | None

    @functools.cached_property
    def before(self) -> StateBefore:
        """What is put back whenever the call has been followed."""
        return StateBefore(self.module, self.args, self.kwargs)

    def timeline(self, limit: Limit) -> Timeline | None:
        """The call, followed in one process; None, and a line, where that is not possible without numbers."""
        module, args, kwargs = self.module, self.args, self.kwargs
        try:
            with uncollected(), self.before.put_back(self.trained):
                prices = limit.prices(module, self.device)
                follow = functools.partial(followed, module, args, kwargs, self.trained, prices, self.partition)
                return self.asked.followed(follow)
        except Exception as error:
            limit.cannot_follow(module, "runs whole", error)
            return None

    def ways(self, limit: Limit, timeline: Timeline, left: float, extents: Mapping[str, int], every: bool) -> list[Fit]:
        """The ways to compute the call, of which all tensors may take ``left`` bytes, the best first; ``extents`` and
        ``every`` as of `ways_to_fit`."""
        module, device, trained = self.module, self.device, self.trained
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad) if trained else 0
        summed = 0 if self.partition is None or not trained else gradients + BUCKET_BYTES
        with bar(None, "distconv: choosing what fits") as advance:

            def in_parts(
                parts: Partition, most: float, first: int, ways: Sequence[SegmentWay]
            ) -> tuple[int, Followed] | None:
                advance()
                beside = stacks_of(parts, device) + BESIDE * (limit.bytes is None and device == "cpu")
                beside += (1 + trained) * sharded_bytes(module)  # Parts have whole parameters and gradients, too.
                given = module, self.args, self.kwargs
                try:
                    unchanged = self.before.put_back(trained)
                    with uncollected(), unchanged, settings.within_call(AS_FOLLOWED), self.asked.answering():
                        taken = parts_within(*given, parts, trained, self.partition, caller_retaining(ways, device))
                        within = functools.partial(with_others, taken, timeline.later, summed)
                        memory, found = largest_within(within, max(first - beside, 1), most - beside)
                except Exception as error:
                    limit.cannot_follow(module, f"does not run in parts {parts} in turn", error)
                    return None
                found = replace(found, with_scratch=found.with_scratch + beside, alone=found.alone + beside)
                return memory, found

            prices = limit.prices(module, device)
            others = 0.0 if limit.bytes is None or math.isinf(limit.bytes) else max(limit.bytes - left, 0)
            return ways_to_fit(timeline, left, extents, in_parts, prices, device, gradients, every, others)
