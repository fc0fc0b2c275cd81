"""Which models of seven libraries run distributed, under partitions.

    python benchmarks/models/models.py                       # what has not been tried yet, in as long as it takes
    python benchmarks/models/models.py --again               # also what did not run the last time
    python benchmarks/models/models.py --only 'timm.*' --minutes 10
    python benchmarks/models/models.py --minutes 0 --save    # only shows what is kept, and writes the table

Every model has random weights and float64 numbers; nothing is downloaded. It is tried in one process that stands for 4
ranks, where nothing is sent: this shows what is refused. What runs there and is not too large then runs on 4 real
ranks, where outputs, gradients and buffers are compared with those of one process. In one more process it is tried in
four parts in turn, and compared likewise. With --save results are kept after every trial; a later run goes on from
there.

It needs the extra `models` (pip install '.[models]').
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from fnmatch import fnmatch
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import Record, finish, joined, parser
from benchmarks.models.entry import IN_TURN
from benchmarks.models.rank import Rank
from benchmarks.models.tables import summary, tables
from benchmarks.models.zoo import zoo
from benchmarks.rank_pool import Failure, Hang, RankPool
from benchmarks.table import write

RANKS = 4
REFUSAL_SECONDS = 150.0
NUMBERS_SECONDS = 300.0
MOST_PARAMETERS, MOST_SECONDS = 30_000_000, 25.0
"""Larger or slower models are not run on real ranks: their operators have run, their numbers are not compared."""

DONE = ("ok", "runs")
ABOUT = """\
Forward and backward of models with random weights, dropout off, in float64, on 4 ranks, and in one process in 4 parts
in turn: `python benchmarks/models/models.py`.

* **ok**: it runs, and outputs, gradients and buffers are those of one process.
* **runs**: all operators run, in one process that stands for 4 ranks; numbers have not been compared, or the model is
  too large for that here.
* **wrong**, **refused**, **crash**, **hang**: what the words say. Beside it stands the first reason.

A difference of more than 1e-9 of the largest value is also ok where inputs that differ by 1e-14 change the result of
one process by a thousandth of that difference or more: such models enlarge rounding.

A model that the table lacks, and an empty cell, have not been tried yet.
"""


class Helpers:
    """Those that try models: started when they are first asked, and anew after they failed."""

    def __init__(self) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        sizes = {"alone": (1, "none"), "fake": (RANKS, "fake"), "gloo": (RANKS, "gloo")}
        self._pools = {kind: RankPool(size, Rank, backend) for kind, (size, backend) in sizes.items()}

    def ask(self, kind: str, within: float, model: str, partition: str) -> Record:
        pool, ranks = self._pools[kind], None if kind == "gloo" else [0]
        try:
            answer = pool.ask("attempt", model, partition, within=within, ranks=ranks, failed=apart)[0]
        except Hang as error:
            return {"result": "crash" if "died" in str(error) else "hang", "reason": str(error)}
        if isinstance(answer, Failure):
            answer = {"result": "crash", "reason": answer.text}
        if kind == "gloo" and apart(answer):
            pool.close()  # ranks that fail apart no longer meet in the same collectives
        return answer

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def apart(answer: Record | Failure) -> bool:
    """Whether a rank has left the others."""
    return isinstance(answer, Failure) or answer["result"] in ("refused", "crash")


def attempt(helpers: Helpers, model: str, partition: str, numbers: bool) -> Record:
    """One model under one partition: first its operators, then its numbers."""
    if partition.startswith(IN_TURN):
        found = helpers.ask("alone", NUMBERS_SECONDS, model=model, partition=partition)
        return {"model": model, "partition": partition, **found, "compared": found["result"] in ("ok", "wrong")}
    found = helpers.ask("fake", REFUSAL_SECONDS, model=model, partition=partition)
    small = found.get("parameters", 0) <= MOST_PARAMETERS and found.get("seconds", 0.0) <= MOST_SECONDS
    if numbers and found["result"] == "runs":
        compared = helpers.ask("gloo", NUMBERS_SECONDS, model=model, partition=partition) if small else {}
        found = {**found, **compared, "compared": compared.get("result") in ("ok", "wrong")}
    return {"model": model, "partition": partition, **found}


def main() -> None:
    options = _options()
    kept = {(record["model"], record["partition"]): record for record in joined("models", [])}
    due = [
        (name, partition)
        for name, entry in zoo().items()
        for partition in entry.partitions
        if partition.startswith(options.partition)
        and any(fnmatch(name, pattern) for pattern in options.only)
        and (
            (known := kept.get((name, partition))) is None
            or options.all
            or (options.again and known["result"] not in DONE)
            or (known["result"] == "runs" and "compared" not in known and not options.operators)
        )
    ]
    ends, tried = time.monotonic() + 60 * options.minutes, []
    helpers = Helpers()
    with contextlib.closing(helpers), tqdm(due, unit="trial", disable=None) as progress:
        for name, partition in progress:
            if time.monotonic() > ends:
                break
            progress.set_postfix_str(f"{name} {partition}")
            tried.append(attempt(helpers, name, partition, not options.operators))
            if options.save:  # after every trial: a later run goes on from there
                write("models", joined("models", tried, "model", "partition"))
    records = joined("models", tried, "model", "partition")
    print(summary(records))
    finish(options, "models", "Models", f"{ABOUT}\n{summary(records)}", tables(records), records)


def _options() -> argparse.Namespace:
    made = parser(__doc__, "models")
    made.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="names of models, as of the shell")
    made.add_argument("--partition", default="", metavar="START", help="only partitions that begin so, as --parts")
    made.add_argument("--again", action="store_true", help="try again what did not run")
    made.add_argument("--all", action="store_true", help="try everything again")
    made.add_argument("--operators", action="store_true", help="do not compare numbers on real ranks")
    made.add_argument("--minutes", type=float, default=1e9, help="begin no trial after so many minutes (0: show only)")
    return made.parse_args()


if __name__ == "__main__":
    main()
