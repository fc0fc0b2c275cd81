"""Twelve networks within a half, a quarter and an eighth of what they take: `--memory` beside other ways to take less.

    python benchmarks/fitting/fits.py --only "3-D U-Net, step" --shares 0.5 0.25 --save

Each network has a process of its own for each share (`trial.py`), beneath a counter of all blocks that torch and its
kernels' libraries allocate, which the C compiler makes of `allocations.c`. The ways follow each other, round after
round. Needed are the extra `models` and spandrel, for one way patch_conv; what is not there is left out.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from benchmarks.fitting.networks import NETWORKS
from benchmarks.harness import Record, finish, joined, parser
from benchmarks.table import Table

RESULT = "fits-cpu"
HERE = Path(__file__).parent
WAYS = "--memory", "checkpoints", "memory budget", "save_on_cpu", "patch_conv"
LONGEST = 1800  # Seconds of one process.
ABOUT = """\
Training steps of nine networks (float32, without an optimizer) and inference of five, within a share of the bytes that
plain torch takes: `python benchmarks/fitting/fits.py`. All ways ran in one process, round after round.

* **whole**, and all other bytes, are the most that tensors and kernels' scratch took at once, weights, inputs and
  gradients included: blocks that the C library gave.
* Each way has its **times**, its median seconds over plain torch's, and in parentheses its bytes over the limit: more
  than 1.00 does not fit. `--memory` is `distconv.fit` with the limit.
  Checkpoints are torch's, of every block; the memory budget is `torch._functorch.config.activation_memory_budget`, at
  the share; patch_conv cuts convolutions into 4 along their height.
* **of predicted**: bytes under `--memory` over those that its line predicts.
* **first** is what the first call with `--memory` took beyond later ones: to choose, and to make plans.
* **error**: the largest relative difference of the loss, or the results' sums, under `--memory`.
"""


def trial(name: str, share: float, rounds: int, counter: Path) -> Record | None:
    """The record of a network within a share; None, and a line, where it could not be measured."""
    words = [sys.executable, str(HERE / "trial.py"), name, str(share), "--rounds", str(rounds)]
    try:
        done = subprocess.run(
            words, env={**os.environ, "LD_PRELOAD": str(counter)}, capture_output=True, text=True, timeout=LONGEST
        )
        record: Record = json.loads(done.stdout.splitlines()[-1])
        return record | {"predicted": predicted(done.stderr)}
    except subprocess.TimeoutExpired:
        reason = f"not done within {LONGEST} s"
    except IndexError:
        reason = done.stderr.strip().splitlines()[-1][:200]
    tqdm.write(f"{name}, {share:g}: {reason}")
    return None


def predicted(lines: str) -> float | None:
    """The bytes that the line of `--memory` predicts."""
    found = re.findall(r"--memory .*: at most ([\d.]+) (\w)iB", lines)
    return None if not found else float(found[-1][0]) * 1024 ** (1 + "KMG".index(found[-1][1]))


def rows(records: list[Record]) -> Iterator[tuple[str, ...]]:
    """A row for each network and share."""
    for record in records:
        plain, fitted = record["ways"]["plain"], record["ways"]["--memory"]

        def cell(way: str, record: Record = record, plain: Record = plain) -> str:
            found = record["ways"].get(way)
            if found is None or "failed" in found:
                return "-" if found is None else "failed"
            return f"{found['seconds'] / plain['seconds']:.2f} ({found['bytes'] / record['limit']:.2f})"

        ends = "-", "-", "-"
        if "failed" not in fitted:
            expected = record.get("predicted")
            ratio = "-" if expected is None else f"{fitted['bytes'] / expected:.2f}"
            ends = ratio, f"{fitted['first'] - fitted['seconds']:.1f} s", f"{fitted['error']:.0e}"
        name = f"{record['network']}, {record['share']:g}"
        yield name, f"{record['whole'] / 2**20:.0f} MiB", *map(cell, WAYS), *ends


def main() -> None:
    made = parser(__doc__, RESULT)
    made.add_argument("--only", nargs="+", default=list(NETWORKS), choices=NETWORKS, metavar="NETWORK")
    made.add_argument("--shares", nargs="+", type=float, default=[0.5, 0.25, 0.125])
    made.add_argument("--rounds", type=int, default=2, help="(default %(default)s)")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder, "allocations.so")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", counter, HERE / "allocations.c"], check=True)
        asked = tqdm([(name, share) for share in options.shares for name in options.only], unit="network")
        found = (trial(name, share, options.rounds, counter) for name, share in asked)
        records = [record for record in found if record is not None]
    if options.save:
        records = joined(RESULT, records, "network", "share")
    headings = "network, share", "whole", *WAYS, "of predicted", "first", "error"
    finish(
        options,
        RESULT,
        "Within a limit of memory",
        ABOUT,
        [Table("Times (bytes over the limit)", headings, [*rows(records)])],
        records,
    )


if __name__ == "__main__":
    main()
