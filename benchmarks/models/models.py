"""Which models run distributed: those of seven libraries, and some that change their own state, under partitions.

    python benchmarks/models/models.py                       # what has not been tried yet, in as long as it takes
    python benchmarks/models/models.py --again               # also what did not run the last time
    python benchmarks/models/models.py --only 'timm.*' --minutes 10
    python benchmarks/models/models.py --table               # only shows what is kept, and writes the table

Every model has random weights and float64 numbers; nothing is downloaded. It is tried in one process that stands for 4
ranks, where nothing is sent: this shows what is refused. What runs there and is not too large then runs on 4 real
ranks, where outputs, gradients and buffers are compared with those of one process. In one more process it is tried in
four parts in turn, and compared likewise. Results are kept after every trial in benchmarks/results/models.json; a later
call goes on from there.

It needs the extra `models` (pip install '.[models]').
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parents[1]))

from benchmarks.models.entry import IN_TURN
from benchmarks.models.tables import summary, tables
from benchmarks.models.zoo import chosen, zoo
from benchmarks.process import Failed, Process
from benchmarks.table import RESULTS, save, show

Record = dict[str, Any]

RANKS = 4
REFUSAL_SECONDS = 150.0
NUMBERS_SECONDS = 300.0
MOST_PARAMETERS, MOST_SECONDS = 30_000_000, 25.0
"""Larger or slower models are not run on real ranks: their operators have run, their numbers are not compared."""

DONE = ("ok", "runs")
ABOUT = """\
Forward and backward of models with random weights, dropout off, in float64, on 4 ranks, and in one process in 4 parts
in turn: `python benchmarks/models/models.py`.

* **ok**: it runs, and outputs, gradients and buffers are those of one process. Models with state are trained for three
  steps, and their parameters are compared, too.
* **runs**: all operators run, in one process that stands for 4 ranks; numbers have not been compared, or the model is
  too large for that here.
* **wrong**, **refused**, **crash**, **hang**: what the words say. Beside it stands the first reason.

A difference of more than 1e-9 of the largest value is also ok where inputs that differ by 1e-14 change the result of
one process by a thousandth of that difference or more: such models enlarge rounding.

A model that the table lacks, and an empty cell, have not been tried yet.
"""


class Helpers:
    """The processes that try models, started when they are first asked and anew after they failed."""

    def __init__(self) -> None:
        self._running: dict[str, Process] = {}
        self._directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._started = 0

    def ask(self, kind: str, within: float, **request: str) -> Record:
        process = self._running.get(kind) or self._start(kind)
        self._running[kind] = process
        began = time.perf_counter()
        try:
            answer: Record = process.ask(within, **request)
        except Failed as error:
            self._drop(kind)
            slow = time.perf_counter() - began >= within
            return {"result": "hang" if slow else "crash", "reason": str(error).split(": ", 1)[-1]}
        if kind == "gloo" and answer["result"] in ("refused", "crash"):
            self._drop(kind)  # ranks that fail apart no longer meet in the same collectives
        return answer

    def _start(self, kind: str) -> Process:
        program = [sys.executable, str(ROOT / "rank.py"), kind]
        self._started += 1
        store = str(Path(self._directory.name, f"store-{self._started}"))
        each = {
            "alone": [[]],
            "fake": [[str(RANKS)]],
            "gloo": [[str(rank), str(RANKS), store] for rank in range(RANKS)],
        }[kind]
        offline = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "GLOO_SOCKET_IFNAME": "lo"}
        return Process(kind, [[*program, *rest] for rest in each], **offline)

    def _drop(self, kind: str) -> None:
        self._running.pop(kind).kill()

    def close(self) -> None:
        for process in self._running.values():
            process.kill()
        self._directory.cleanup()


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


class Kept:
    """The results so far, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        read = json.loads(path.read_text()) if path.exists() else []
        self.records: dict[tuple[str, str], Record] = {(r["model"], r["partition"]): r for r in read}

    def add(self, record: Record) -> None:
        self.records[record["model"], record["partition"]] = record
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(self.sorted(), indent=1) + "\n")

    def sorted(self) -> list[Record]:
        return [self.records[key] for key in sorted(self.records)]


def main() -> None:
    options = _options()
    kept = Kept(options.results / "models.json")
    entries = zoo()
    due = [
        (name, partition)
        for name in chosen(entries, options.only)
        for partition in entries[name].partitions
        if (known := kept.records.get((name, partition))) is None
        or options.all
        or (options.again and known["result"] not in DONE)
        or (known["result"] == "runs" and "compared" not in known and not options.operators)
    ]
    due = [(name, partition) for name, partition in due if partition.startswith(options.partition)]
    ends = time.monotonic() + 60 * options.minutes
    helpers = Helpers()
    with contextlib.closing(helpers), tqdm(due if not options.table else [], unit="trial") as progress:
        for name, partition in progress:
            if time.monotonic() > ends:
                break
            progress.set_postfix_str(f"{name} {partition}")
            kept.add(attempt(helpers, name, partition, not options.operators))
            progress.set_description(summary(kept.sorted(), short=True))
    records = kept.sorted()
    shown = tables(records)
    show(shown)
    print(summary(records))
    if options.results == RESULTS:
        save("models", "Models", f"{ABOUT}\n{summary(records)}", shown, records)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="names of models, as of the shell")
    parser.add_argument("--partition", default="", metavar="START", help="only partitions that begin so, as --parts")
    parser.add_argument("--again", action="store_true", help="try again what did not run")
    parser.add_argument("--all", action="store_true", help="try everything again")
    parser.add_argument("--operators", action="store_true", help="do not compare numbers on real ranks")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no trial after so many minutes")
    parser.add_argument("--table", action="store_true", help="try nothing; show and write what is kept")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where results are kept")
    return parser.parse_args()


if __name__ == "__main__":
    main()
