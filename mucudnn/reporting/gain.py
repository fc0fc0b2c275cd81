"""Gain: what mucudnn has saved in a run, in two or three lines at its end."""

from __future__ import annotations

from mucudnn.reporting.record import Record
from mucudnn.reporting.run_file import Outcome
from mucudnn.sizes import format_bytes

NOTHING_MET = "no convolution was met: the program called none of torch's"
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
    saved, trials = (sum(values) for values in zip(*((r.saved, r.trials) for r in outcome.records), strict=True))
    done = "saved" if saved >= 0 else "lost"
    text = f"about {abs(saved):.3g} s {done} in this run against torch's own kernels, by the times on record"
    if trials:
        text += f", {trials} trials included"
    return text if saved >= 0 else f"{text}; what these found is kept for the next run"


def _is_stock(record: Record) -> bool:
    return all(algorithm == "stock" for _, algorithm in record.parts)
