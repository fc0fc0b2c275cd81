"""What the campaign has found, counted: by how networks were run, by operator refused, and of their plans."""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence
from typing import Any

from benchmarks.table import Table

OUTCOMES = ("right", "rounding", "wrong", "refused", "crash", "hang")
FAULTS = ("wrong", "crash", "hang")
PLAN_OUTCOMES = ("right", "refused", "wrong", "crash")

Record = dict[str, Any]


def is_fault(record: Record) -> bool:
    """Whether a network, or a plan of it, is wrong, crashes or hangs."""
    return record["outcome"] in FAULTS or record.get("plans", {}).get("outcome") in FAULTS


def counts(records: Sequence[Record]) -> dict[str, int]:
    """How many networks had each outcome."""
    counted = collections.Counter(record["outcome"] for record in records)
    return {outcome: counted[outcome] for outcome in OUTCOMES}


def tables(records: Sequence[Record]) -> list[Table]:
    """Outcomes by how networks were run, and what is refused, by operator."""
    able = [record for record in records if record["outcome"] != "unable"]

    def split(record: Record) -> str:
        axes = {part.split("=")[0] for part in record["partition"].split(",") if not part.endswith("=1")}
        kinds = ["samples"] * ("sample" in axes) + ["channels"] * bool(axes & {"channel", "filter"})
        return " and ".join([*kinds, *["space"] * bool(axes & {"depth", "height", "width"})]) or "nothing"

    groups: dict[str, list[Record]] = {}
    for record in able:
        groups.setdefault(f"split: {split(record)}", []).append(record)
    groups = dict(sorted(groups.items()))
    groups["with mucudnn"] = [record for record in able if record["limit"]]
    groups["of these, divided"] = [record for record in able if record.get("divided")]
    groups["compiled"] = [record for record in able if record["compiled"]]
    groups["bfloat16"] = [record for record in able if record["dtype"] == "bfloat16"]
    groups["all"] = able
    rows = [(name, str(len(group)), *map(str, counts(group).values())) for name, group in groups.items()]
    refused = collections.Counter(r.get("operator", "") for r in able if r["outcome"] == "refused")
    why = {r.get("operator", ""): r.get("why", "") for r in able if r["outcome"] == "refused"}
    return [
        Table("Random networks against one process", ("networks", "number", *OUTCOMES), rows),
        Table(
            "Refused", ("operator", "networks", "for example"), [(o, str(n), why[o]) for o, n in refused.most_common()]
        ),
        planned(able),
    ]


def planned(records: Sequence[Record]) -> Table:
    """What became of the plans of networks for more ranks than there are."""
    groups: dict[str, list[str]] = {}
    for record in records:
        if "plans" in record:
            axes = record["plans"]["partition"].split(",")
            ranks = math.prod(int(axis.split("=")[1]) for axis in axes)
            groups.setdefault(f"{ranks} ranks, {len(axes)} axes", []).append(record["plans"]["outcome"])
    rows = [
        (name, str(len(group)), *(str(group.count(outcome)) for outcome in PLAN_OUTCOMES))
        for name, group in sorted(groups.items())
    ]
    return Table("Plans for ranks that are not there", ("on", "networks", *PLAN_OUTCOMES), rows)
