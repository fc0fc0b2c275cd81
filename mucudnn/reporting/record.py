"""The record of how one convolution is computed and what else was tried, with its JSON form; and what a run leaves: the
file that `run --report` writes, and the lines at its end that say how much time it has saved.

The file has the records of all convolutions, and the memory of one step.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.sizes import format_bytes


@dataclass(frozen=True)
class Record:
    """How one convolution is computed in one direction, and what else could have been.

    Attributes:
        problem: the convolution.
        direction: "forward", "backward_data" or "backward_filter".
        limit: bytes of workspace that were allowed; `math.inf` for no limit.
        parts: the division, as (extent, algorithm) per launch.
        seconds: of the division, predicted from the times of its launches.
        undivided_seconds: of the best algorithm within the limit that takes the whole mini-batch at once.
        stock_seconds: of torch's own kernel.
        workspace: bytes that the division uses.
        dim: what is divided: "batch", where extents are samples, or "depth", "height" or "length", where they are rows.
        whole_workspace: bytes that the division's algorithms, other than torch's own, would need undivided.
        trials: calls of the program that tried something, where planning is live.
        cost: seconds that these took more than torch's own kernel would have; negative where they were faster.
        tries: algorithms, and how many of these calls tried each.
        calls: of the program, in this run, that the division computed.
        leader: the algorithms of the fastest of what was tried so far, "" where that is torch's own kernel; `None`
            where nothing is tried any more, the division being what was chosen.
        leader_seconds: what that takes.
        wrong: algorithms whose results were wrong, and what was wrong. They are not used, but for torch's own kernel,
            "stock", which computes the whole where nothing else does.
        stock_workspace: bytes of scratch memory of torch's own kernel on the whole; `None` where it is not counted.
        seen: seconds that the calls in this run took; 0 where they were not timed.
        spread: the factor within which the ratio of `seconds` to `stock_seconds` is known, as the two were timed in
            turn; while something is tried, that of `stock_seconds`.
        is_stock_assumed: whether torch's own kernel was never timed, as its scratch memory exceeds the limit:
            `stock_seconds` follow from its operations and bytes.
    """

    problem: ConvProblem
    direction: str
    limit: float
    parts: tuple[tuple[int, str], ...]
    seconds: float
    undivided_seconds: float
    stock_seconds: float
    workspace: int
    dim: str = "batch"
    whole_workspace: int = 0
    trials: int = 0
    cost: float = 0.0
    tries: tuple[tuple[str, int], ...] = ()
    calls: int = 0
    leader: str | None = None
    leader_seconds: float = 0.0
    wrong: tuple[tuple[str, str], ...] = ()
    stock_workspace: int | None = None
    seen: float = 0.0
    spread: float = 1.0
    is_stock_assumed: bool = False

    @property
    def saved(self) -> float:
        """Seconds of this run that torch's own kernel would have taken more; negative where trials cost more.

        What the calls took in this run counts, and the ratio of the times that were taken in turn: the speed of a
        machine changes.
        """
        return self._saved(1.0)

    @property
    def saved_within(self) -> tuple[float, float]:
        """The least and the most that `saved` may be, by the spread of the times."""
        most = math.sqrt(self.spread)
        return self._saved(1 / most), self._saved(most)

    def _saved(self, factor: float) -> float:
        """`saved`, if torch's own kernel took so many times as long."""
        seen, ratio = self.seen or self.calls * self.seconds, self.stock_seconds / max(self.seconds, 1e-12)
        gained = seen * (factor * ratio - 1) if self.calls else 0.0
        return gained - self.cost + (self.trials * (factor - 1) * self.stock_seconds if self.trials else 0.0)

    @property
    def excess(self) -> str:
        """By how much torch's own kernel exceeds the limit where nothing else keeps it, in a sentence."""
        scratch = f"{format_bytes(self.workspace)} of scratch memory in torch's own kernel"
        return f"{self.direction} of {self.problem} takes {scratch}: nothing fits {format_bytes(self.limit)}"

    @property
    def is_divided(self) -> bool:
        """Whether the convolution is divided into several launches."""
        return len(self.parts) > 1

    @property
    def division(self) -> str:
        """The parts in short: "4xfft(16) + gemm(3)", or "depth 4xfft(16)" if not along the batch."""
        runs = ((len(list(group)), extent, algorithm) for (extent, algorithm), group in groupby(self.parts))
        parts = " + ".join(
            f"{f'{count}x' if count > 1 else ''}{algorithm}({extent})" for count, extent, algorithm in runs
        )
        return parts if self.dim == "batch" else f"{self.dim} {parts}"


def to_json(records: Iterable[Record]) -> list[dict[str, Any]]:
    """The records as plain values for `json.dump`; `null` means no limit, or a spread that is not known."""
    unbounded = ("limit", "spread")
    return [
        asdict(record) | {name: None for name in unbounded if getattr(record, name) == math.inf} for record in records
    ]


def from_json(values: Any) -> list[Record]:
    """The records that `to_json` made, after `json.load` or before `json.dump`."""
    return [_record(value) for value in values]


def _record(value: dict[str, Any]) -> Record:
    problem: dict[str, Any] = {
        name: tuple(item) if isinstance(item, list) else item for name, item in value["problem"].items()
    }
    problem["direction"] = Direction(problem["direction"])
    record = Record(**value | {"problem": ConvProblem(**problem)})
    return replace(
        record,
        limit=math.inf if record.limit is None else record.limit,
        spread=math.inf if record.spread is None else record.spread,
        parts=tuple((int(extent), str(algorithm)) for extent, algorithm in record.parts),
        tries=tuple((str(algorithm), int(count)) for algorithm, count in record.tries),
        wrong=tuple((str(algorithm), str(fault)) for algorithm, fault in record.wrong),
    )


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
