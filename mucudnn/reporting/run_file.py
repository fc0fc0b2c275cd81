"""What a run leaves: the file that `run --report` writes, and the lines at its end that say how much time it has saved.

The file has the records of all convolutions, and the memory of one step.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mucudnn.reporting.record import Record, from_json, to_json
from mucudnn.sizes import format_bytes


@dataclass(frozen=True)
class Moment:
    """A convolution in the one step whose memory was recorded, in the order of the calls."""

    name: str  # The convolution, for people.
    live: int  # Bytes that are alive when it is called, its result among them.
    workspace: int  # Bytes that its plan uses.
    budget: float  # Bytes that it may use; `math.inf` for no limit.


@dataclass(frozen=True)
class Outcome:
    """The result of a run: the records, and the memory of a step where it was recorded."""

    records: Sequence[Record]  # Of every convolution that was timed.
    timeline: Sequence[Moment] = ()  # Of one step; empty where none was recorded.
    notices: Sequence[str] = ()  # What a user should know about the settings, a sentence each.
    called: int = 0  # Number of convolutions, by shape and direction, that the program called, timed or not.

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dump`; a limit or budget of `null` means unlimited."""
        timeline = [
            asdict(moment) | {"budget": None if moment.budget == math.inf else moment.budget}
            for moment in self.timeline
        ]
        plans = to_json(self.records)
        return {"plans": plans, "timeline": timeline, "notices": list(self.notices), "called": self.called}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that `run --report` promises. Raises OSError if it cannot be written."""
        Path(path).write_text(json.dumps(self.to_json(), indent=2) + "\n")

    @classmethod
    def from_json(cls, values: Any) -> Outcome:
        """The outcome that `to_json` made. Raises ValueError if the values are something else."""
        try:
            timeline = [
                Moment(**moment | {"budget": math.inf if moment["budget"] is None else moment["budget"]})
                for moment in values["timeline"]
            ]
            notices = tuple(map(str, values.get("notices", ())))
            return cls(from_json(values["plans"]), timeline, notices, int(values.get("called", 0)))
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"this is no report of a run: {type(error).__name__}: {error}") from error


NOTHING_CALLED = "no convolution was called: the program used none of torch's"
KNOWN = 1.5  # A number of seconds is reported if it is known to this factor.

UNLIKE = "torch's own kernels were timed too seldom, or took unlike times"
NEXT = "next: python -m mucudnn report shows the times on record; run --verbose shows a row for each convolution"


def gained(outcome: Outcome, report: str | None = None) -> list[str]:
    """How many convolutions were called and divided, the time saved by that, and what to type next; a sentence each.

    ``report``: the file that the run has written, if it has.
    """
    called = max(outcome.called, len(outcome.records))
    if not called:
        return [NOTHING_CALLED]
    lines = [_called(outcome, called)]
    if any(record.calls or record.trials for record in outcome.records):
        lines.append(_saved(outcome))
    return [*lines, NEXT if report is None else f"next: python -m mucudnn report {report}"]


def _called(outcome: Outcome, called: int) -> str:
    records = outcome.records
    exploring = sum(1 for record in records if record.trials and _is_stock(record) and not record.calls)
    kinds = {
        "divided": sum(record.is_divided for record in records),
        "undivided by a faster algorithm": sum(not record.is_divided and not _is_stock(record) for record in records),
        "tried, by torch's own kernel so far": exploring,
    }
    counts = [f"{count} {what}" for what, count in kinds.items() if count]
    rest = called - sum(kinds.values())
    if rest:
        counts.append(f"{rest} by torch's own kernel")
    text = f"{called} convolution{'s' * (called > 1)} called (by shape and direction): {', '.join(counts)}"
    used = [record for record in records if record.workspace]
    if used:
        most = max(used, key=lambda record: record.workspace)
        text += f"; workspace at most {format_bytes(most.workspace)} of {format_bytes(most.limit)}"
    return text


def _saved(outcome: Outcome) -> str:
    trials = sum(record.trials for record in outcome.records)
    included = f", {trials} trial{'s' * (trials > 1)} included" if trials else ""
    kept = "; what these found is kept for the next run" if trials else ""
    saved = known(outcome.records)
    if saved is None:
        return f"what this run has saved or lost is not known{included}: {UNLIKE}{kept}"
    done = "saved" if saved >= 0 else "lost"
    text = f"about {abs(saved):.3g} s {done} in this run against torch's own kernels, by times taken in turn{included}"
    return text if saved >= 0 else text + kept


def known(records: Iterable[Record]) -> float | None:
    """Seconds that the records have saved together; `None` where that is not known to a factor of `KNOWN`."""
    every = [(record.saved, *record.saved_within) for record in records]
    saved, least, most = (sum(values) for values in zip(*every, strict=True))
    if not math.isfinite(least + most):
        return None
    low, high = sorted((abs(least), abs(most)))
    is_known = least == most or (least * most > 0 and high <= KNOWN * low)
    return saved if is_known else None


def _is_stock(record: Record) -> bool:
    return all(algorithm == "stock" for _, algorithm in record.parts)
