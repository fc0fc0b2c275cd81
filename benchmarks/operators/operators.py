"""torch's own samples of its operators and modules, over shards and in one process: what is right, and what refused.

    python benchmarks/operators/operators.py  # everything, half an hour on two cores; goes on where it ended
    python benchmarks/operators/operators.py --only cumsum    # the entries whose names contain this, in seconds
    python benchmarks/operators/operators.py --again refused  # those that were refused before; the others stay
    python benchmarks/operators/operators.py --save           # keeps table and figures in benchmarks/results

The samples are those PyTorch tests itself with (OpInfo and module samples, float64): of every operator at most
``--samples``, taken evenly, and one of its variant in place. Four real ranks compute each over every partition that
cuts some of its tensors, forward and backward, and compare all results and gradients with one process. A case is one
sample over one partition. It needs the packages expecttest and scipy (pip install '.[operators]').

Sharded are the tensors of as many dims as the sample's input, or more; tensors of fewer dims, such as targets, indices
and weights, stay plain, and so do a layer's parameters. Samples with sparse tensors are left out.

    right    equal to one process within 1e-9 of the largest element; of what draws at random: the shapes
    gathered right, after small tensors were gathered: with larger ones (--small 0) it would be refused
    wrong    anything else that came back
    refused  UnsupportedOperation on every rank
    crash    another error where one process has none, or errors that differ between ranks
    hang     no answer within 30 s, or within 6 s of another rank's error
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")

from benchmarks.table import RESULTS, Table, save, show

PARTITIONS = ("channel=4", "height=2,width=2", "sample=2,height=2", "sample=2,channel=2")
OUTCOMES = ("right", "gathered", "wrong", "refused", "crash", "hang")
PARTIAL = RESULTS / "operators-partial.jsonl"

Case = tuple[str, int, str]
"""(entry, number of its sample, partition)."""


def kept(path: Path, samples: int) -> dict[Case, dict[str, Any]]:
    """What earlier runs with as many samples have found; cases of a run come after those that they replace."""
    found: dict[Case, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        record = json.loads(line)
        if record["samples"] == samples:
            found[record["entry"], record["sample"], record["partition"]] = record
    return found


def measure(options: argparse.Namespace, found: dict[Case, dict[str, Any]]) -> None:
    """Adds to ``found``, and to the file, the cases that are asked for."""
    from benchmarks.operators.pool import Pool
    from benchmarks.operators.samples import entries

    listed = entries()
    chosen = [
        index for index, entry in enumerate(listed) if not options.only or any(o in entry.name for o in options.only)
    ]
    chosen = chosen[:: options.every]
    stale = {case for case, record in found.items() if record["outcome"] in options.again}
    pool = Pool(4, listed, options.samples, options.small)
    with options.partial.open("a") as file, tqdm(chosen, unit="entry", disable=not sys.stderr.isatty()) as bar:
        for index in bar:
            entry = listed[index].name
            bar.set_description(entry)
            if options.again and not any(case[0] == entry for case in stale):
                continue
            for sample in range(pool.open(index)):
                for partition in options.partition:
                    case = (entry, sample, partition)
                    if case in found and case not in stale:
                        continue
                    outcome, direction, said = pool.compare(index, sample, partition)
                    record = {"samples": options.samples, "entry": entry, "sample": sample, "partition": partition}
                    found[case] = record | {"outcome": outcome, "direction": direction, "said": said}
                    print(json.dumps(found[case]), file=file, flush=True)
    pool.close()


def counts(records: Iterable[dict[str, Any]]) -> dict[str, int]:
    """How many cases had each outcome."""
    counted = collections.Counter(record["outcome"] for record in records)
    return {outcome: counted[outcome] for outcome in OUTCOMES}


def tables(records: Sequence[dict[str, Any]], partitions: Sequence[str]) -> list[Table]:
    """Outcomes by partition, and by each entry of which not all cases are right."""
    headings = ("partition", "cases", *OUTCOMES)
    groups = {p: [r for r in records if r["partition"] == p] for p in partitions} | {"all": list(records)}
    entries: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        entries.setdefault(record["entry"], []).append(record)

    def row(name: str, group: Sequence[dict[str, Any]]) -> tuple[str, ...]:
        return name, str(len(group)), *map(str, counts(group).values())

    unlike = [row(name, group) for name, group in entries.items() if counts(group)["right"] < len(group)]
    return [
        Table("Samples by partition", headings, [row(name, group) for name, group in groups.items() if group]),
        Table("Entries of which not all cases are right", ("entry", *headings[1:]), unlike),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", help="entries whose names contain this; may be given again")
    parser.add_argument("--every", type=int, default=1, help="only every so many-th entry (%(default)s)")
    parser.add_argument("--samples", type=int, default=8, help="the most samples of an entry (%(default)s)")
    parser.add_argument(
        "--small", type=int, default=1 << 20, help="bytes that tensors may take to be gathered (%(default)s)"
    )
    parser.add_argument("--partition", action="append", help=f"(default: {', '.join(PARTITIONS)})")
    parser.add_argument("--again", action="append", default=[], choices=OUTCOMES, help="repeat cases of this outcome")
    parser.add_argument("--partial", type=Path, default=PARTIAL, help="what is kept between runs (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write table and figures to benchmarks/results")
    options = parser.parse_args()
    options.partition = options.partition or list(PARTITIONS)
    return options


def main() -> None:
    options = arguments()
    options.partial.parent.mkdir(exist_ok=True)
    found = kept(options.partial, options.samples)
    measure(options, found)
    records = [
        record
        for record in found.values()
        if record["outcome"] in OUTCOMES and (not options.only or any(o in record["entry"] for o in options.only))
    ]
    shown = tables(records, options.partition)
    show(shown)
    if options.save:
        save("operators-cpu", "torch's samples of operators and modules", __doc__ or "", shown)


if __name__ == "__main__":
    main()
