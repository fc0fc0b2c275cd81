"""A training step of mucudnn's plans in which memory runs out, at each of its allocations in turn.

    python benchmarks/faults/out_of_memory.py                  # every arm, a few minutes on one core
    python benchmarks/faults/out_of_memory.py --arm "a total" --every 10
    python benchmarks/faults/out_of_memory.py --save           # keeps table and figures in benchmarks/results

A small network of convolutions is trained on the host under each kind of limit. Once its plans are made, a step is run
in which the allocator fails: at the first allocation, then at the second, and so on, until a step has fewer. Either
that allocation fails alone, or all later ones of at least its size do, too. The last arm does so while plans are made.
Times are drawn, so that convolutions are divided, whatever is fast on this machine.

    went on     the step is right without another plan: what failed was a measurement, or a try of live planning
    gave way    the step is right: a smaller plan took the place of one that failed, or torch's own kernel, as is told
    ended       the step ended in the allocator's own error
    wrong       the step, or the next one, has other numbers than torch in float64
    unclear     it ended in another error, or in more than a line, or went on without a word by another plan
    leaked      memory of the step was not given back
    crash       the process died

The exit code is 1 where there is any of the last four. Failures come from a library in C that stands before the
allocator (`failing_allocator.c`, built by `cc`; Linux). Only memory of tensors fails: oneDNN does not look whether it
got the memory that it asks for itself, and dies of that without mucudnn, too (torch 2.13).
"""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness import ROOT, finish, parser
from benchmarks.table import Table

ARMS = ("a limit", "a limit, bfloat16", "a total", "a limit of memory", "planned live", "while planning")
OUTCOMES = ("went on", "gave way", "ended", "wrong", "unclear", "leaked", "crash")
FAULTS = OUTCOMES[3:]


def built(folder: Path) -> Path:
    """The library before the allocator. SystemExit, one line, where it cannot be built."""
    compiler, library = shutil.which("cc"), folder / "failing_allocator.so"
    if compiler is None or sys.platform != "linux":
        raise SystemExit("out_of_memory: needs Linux and a C compiler, `cc`")
    source = Path(__file__).with_name("failing_allocator.c")
    words = [compiler, "-O2", "-shared", "-fPIC", "-pthread", "-o", str(library), str(source)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"out_of_memory: {source.name} cannot be built: {done.stderr.strip().splitlines()[0]}")
    return library


def outcomes(arm: str, lasting: bool, every: int, library: Path) -> list[dict[str, Any]]:
    """What became of the steps of an arm: one for each ``every``-th allocation. Anew after a process that died."""
    found: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "benchmarks.faults.out_of_memory_trial", arm, str(int(lasting)), str(every)]
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with tqdm(desc=f"{arm}, {'from then on' if lasting else 'once'}", unit="allocation", leave=False) as bar:
        while True:
            words = [*command, str(1 + every * len(found))]
            with subprocess.Popen(words, cwd=ROOT, env=environment, **pipes) as trial:
                for record in map(json.loads, trial.stdout):
                    if record is None:
                        return found
                    found.append(record)
                    bar.update()
                said = trial.stderr.read().strip().splitlines()
            if trial.returncode >= 0:
                raise SystemExit(f"out_of_memory: {arm}: {said[-1] if said else f'exit code {trial.returncode}'}")
            found.append({"allocation": 1 + every * len(found), "outcome": "crash", "said": f"{trial.returncode}"})


def table(found: dict[str, list[dict[str, Any]]]) -> Table:
    """A row for each arm: how many steps had each outcome."""
    rows = []
    for name, records in found.items():
        counted = collections.Counter(record["outcome"] for record in records)
        rows.append((name, str(len(records)), *(str(counted[outcome]) for outcome in OUTCOMES)))
    return Table("Steps in which memory ran out", ("under", "steps", *OUTCOMES), rows)


def main() -> int:
    made = parser(__doc__, "out-of-memory")
    made.add_argument("--arm", action="append", choices=ARMS, help="only this one; may be given again")
    made.add_argument("--every", type=int, default=1, help="only each so many-th allocation (%(default)s)")
    options = made.parse_args()
    if options.every < 1:
        made.error(f"--every {options.every}: accepted: 1 and more")
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        library = built(Path(folder))
        for arm in options.arm or ARMS:
            for lasting, name in ((False, "once"), (True, "from then on")):
                found[f"{arm}, {name}"] = outcomes(arm, lasting, options.every, library)
    some = f"\n\nOne allocation in {options.every}." if options.every > 1 else ""
    finish(options, "out-of-memory", "Out of memory", f"{__doc__}{some}", [table(found)])
    faults = [(name, record) for name, records in found.items() for record in records if record["outcome"] in FAULTS]
    for name, record in faults:
        print(f"{name}, allocation {record['allocation']}: {record['outcome']}: {record['said']}")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
