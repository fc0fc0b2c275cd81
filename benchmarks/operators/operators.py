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
import itertools
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

from benchmarks.harness import Records, finish, parser
from benchmarks.table import RESULTS, Table

PARTITIONS = ("channel=4", "height=2,width=2", "sample=2,height=2", "sample=2,channel=2")
OUTCOMES = ("right", "gathered", "wrong", "refused", "crash", "hang")
PARTIAL = RESULTS / "operators-partial.jsonl"

KEY = "samples", "entry", "sample", "partition"
"""By which a case is known."""


def measure(options: argparse.Namespace, kept: Records) -> None:
    """Adds the cases that are asked for."""
    from benchmarks.operators.pool import Pool
    from benchmarks.operators.samples import entries

    listed = entries()
    chosen = [place for place, entry in enumerate(listed) if is_chosen(entry.name, options)][:: options.every]
    stale = {case for case, record in kept.found.items() if record["outcome"] in options.again}
    pool = Pool(4, listed, options.samples, options.small)
    with tqdm(chosen, unit="entry", disable=None) as bar:
        for index in bar:
            entry = listed[index].name
            bar.set_description(entry)
            if options.again and not any(case[1] == entry for case in stale):
                continue
            for sample, partition in itertools.product(range(pool.open(index)), options.partition):
                case = options.samples, entry, sample, partition
                if case not in kept.found or case in stale:
                    found = zip(("outcome", "direction", "said"), pool.compare(index, sample, partition), strict=True)
                    kept.add({**dict(zip(KEY, case, strict=True)), **dict(found)})
    pool.close()


def is_chosen(name: str, options: argparse.Namespace) -> bool:
    return not options.only or any(part in name for part in options.only)


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


def main() -> None:
    made = parser(__doc__, "operators-cpu")
    made.add_argument("--only", action="append", help="entries whose names contain this; may be given again")
    made.add_argument("--every", type=int, default=1, help="only every so many-th entry (%(default)s)")
    made.add_argument("--samples", type=int, default=8, help="the most samples of an entry (%(default)s)")
    most = "bytes that tensors may take to be gathered (%(default)s)"
    made.add_argument("--small", type=int, default=1 << 20, help=most)
    made.add_argument("--partition", action="append", help=f"(default: {', '.join(PARTITIONS)})")
    made.add_argument("--again", action="append", default=[], choices=OUTCOMES, help="repeat cases of this outcome")
    made.add_argument("--partial", type=Path, default=PARTIAL, help="what is kept between runs (%(default)s)")
    options = made.parse_args()
    options.partition = options.partition or list(PARTITIONS)
    kept = Records(options.partial, *KEY)
    measure(options, kept)
    records = [
        record
        for record in kept.found.values()
        if record["samples"] == options.samples
        and record["outcome"] in OUTCOMES
        and is_chosen(record["entry"], options)
    ]
    title = "torch's samples of operators and modules"
    finish(options, "operators-cpu", title, __doc__, tables(records, options.partition))


if __name__ == "__main__":
    main()
