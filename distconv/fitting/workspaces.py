"""What a call within a limit of all memory leaves for the workspaces of its convolutions, which mucudnn divides."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any, NamedTuple

from distconv.fitting.choice import MARGIN, Fit
from distconv.fitting.timeline import Timeline
from mucudnn.runtime.shim import current_session


class Workspaces(NamedTuple):
    """Bytes that are left, besides torch's own scratch memory, for the workspace of a convolution: for each kind the
    least at any of its moments, and for other kinds.

    ``by_kind``: by `mucudnn.convolution.call.Call.kind`; None: the kinds of convolutions are not known.
    """

    by_kind: Mapping[Any, int] | None
    others: int

    def apply(self, plan: object) -> None:
        """Bounds the workspaces of this process's convolutions, if mucudnn divides these, while ``plan`` is alive."""
        session = current_session()
        if session is not None and self != EVERY:
            session.leave(plan, self.by_kind, self.others)


EVERY = Workspaces({}, 1 << 62)  # Where nothing is known of a call.


def workspaces_within(timeline: Timeline, found: Fit, limit: float) -> Workspaces:
    """What is left of ``limit`` bytes where a call is computed as ``found`` says. Kinds of convolutions of parts are
    not known, as parts differ."""
    limit = min(limit, 1 << 62) / (1 if found.slower <= 1 else MARGIN)
    others = max(int(limit - found.peak), 0)
    if found.partition is not None:
        return Workspaces(None, others)
    alive, ticks = timeline.alive(), [tick for tick, _ in found.peaks]
    left: dict[Any, int] = {}
    for tick, kind in timeline.convolutions:
        stage = bisect.bisect_right(ticks, timeline.forward_tick[tick]) - 1
        most = found.peaks[stage][1] if ticks else alive[tick]
        size = max(int(limit - most), 0)
        left[kind] = min(size, left.get(kind, size))
    return Workspaces(left, others)
