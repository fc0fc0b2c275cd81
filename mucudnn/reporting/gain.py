"""Gain: what mucudnn has saved in a run, in two or three lines at its end."""

from __future__ import annotations

import math
from collections.abc import Iterable

from mucudnn.reporting.record import Record
from mucudnn.reporting.run_file import Outcome
from mucudnn.sizes import format_bytes

NOTHING_MET = "no convolution was met: the program called none of torch's"
KNOWN = 1.5
"""A number of seconds is told if it is known to this factor."""

UNLIKE = "torch's own kernels were timed too seldom, or took unlike times"
NEXT = "next: python -m mucudnn report shows the times on record; run --verbose shows a row for each convolution"


def gained(outcome: Outcome, report: str | None = None) -> list[str]:
    """What was met and divided, what that saved in this run, and what to type next; a sentence each.

    Args:
        report: the file that the run has written, if it has.
    """
    met = max(outcome.met, len(outcome.records))
    if not met:
        return [NOTHING_MET]
    told = [_met(outcome, met)]
    if any(record.calls or record.trials for record in outcome.records):
        told.append(_saved(outcome))
    return [*told, NEXT if report is None else f"next: python -m mucudnn report {report}"]


def _met(outcome: Outcome, met: int) -> str:
    records = outcome.records
    exploring = sum(1 for record in records if record.trials and _is_stock(record) and not record.calls)
    kinds = {
        "divided": sum(record.is_divided for record in records),
        "undivided by a faster algorithm": sum(not record.is_divided and not _is_stock(record) for record in records),
        "tried, by torch's own kernel so far": exploring,
    }
    told = [f"{count} {what}" for what, count in kinds.items() if count]
    rest = met - sum(kinds.values())
    if rest:
        told.append(f"{rest} by torch's own kernel")
    text = f"{met} convolution{'s' * (met > 1)} met (by shape and direction): {', '.join(told)}"
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
