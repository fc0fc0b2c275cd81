"""Parts in turn beside one process: the memory, the seconds and the numbers of decoders and of a training step.

    python benchmarks/turns/turns.py                              # everything, and writes the table
    python benchmarks/turns/turns.py --only AutoencoderKL UNet3d --rounds 1

Each call is made by `call.py`, beside this file, in a process of its own: in one process, in eight parts in turn, and
in these parts within a limit of memory, which is a share of what one process needs. The ways follow each other, round
after round; shown are medians. Results are kept after every call; a later run goes on from there.

It needs the extra `models`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parents[1]))

import torch

from benchmarks.table import RESULTS, Table, save, show

RESULT = "turns-cpu"
SHARE = 0.1
"""The limit of the parts, of the memory of one process."""


class Case(NamedTuple):
    """A call: the work, size, dtype and parts that `call.py` takes, and the share of one process's memory."""

    work: str
    size: int
    dtype: str = "float32"
    parts: str = "height=8"
    share: float = SHARE

    @property
    def name(self) -> str:
        """As `--only` knows it."""
        return self.work if self.dtype == "float32" else f"{self.work}-{self.dtype}"


CASES = {
    case.name: case
    for case in (
        Case("AutoencoderKL", 192),
        Case("AutoencoderKL-wide", 80),
        Case("AutoencoderKLWan", 48),
        Case("AutoencoderKLHunyuanVideo", 48),
        Case("AutoencoderKLCogVideoX", 24),
        Case("AutoencoderKLLTXVideo", 24),
        Case("UNet3d", 128, parts="depth=8"),
        Case("AutoencoderKL", 64, "float64", share=0.08),
        Case("AutoencoderKLWan", 48, "float64", share=0.08),
        Case("AutoencoderKLHunyuanVideo", 16, "float64", share=0.08),
        Case("AutoencoderKLCogVideoX", 16, "float64", share=0.08),
        Case("AutoencoderKLLTXVideo", 16, "float64", share=0.08),
    )
}

ABOUT = f"""\
Decoders of diffusers (of full depth and small width; the wide one has its usual width) and a training step of a 3-D
U-Net, with random weights: `python benchmarks/turns/turns.py`. Each was computed in one process, in eight parts in
turn, and in eight parts in turn within a limit of {SHARE:.0%} of the memory that one process needed, in float64 of
8 %.

* **memory**: the weights, and by how much the resident memory of the process grew at most during two calls, with all
  that libraries take. **part** is relative to one process.
* **seconds**: processor time of the second call, on one core; **times** is relative to one process. In a first call
  parts also make their plans.
* **error**: the largest difference of a result, the loss or a gradient from one process, relative to the largest value
  of that tensor, or to a thousandth of the largest of all where that is more.

The narrow decoders compute an eighth of what wide ones compute for each byte, so the time that transfers take is the
worst case. About 50 MiB of the parts' memory are plans and threads, whatever the size.
"""

Record = dict[str, Any]


def command(work: str, size: int, *more: str) -> list[str]:
    """The command line of a call by `call.py`."""
    return [sys.executable, str(ROOT / "call.py"), work, "--size", str(size), *more]


def surroundings() -> dict[str, str]:
    """The environment of such a call."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def call(work: str, size: int, *more: str) -> Record:
    """What `call.py` prints. CalledProcessError where it fails."""
    line = command(work, size, *more)
    done = subprocess.run(line, env=surroundings(), stdout=subprocess.PIPE, text=True, check=True)
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(case: Case, rounds: int) -> Record:
    """One call in all ways."""
    work, size, dtype, parts, share = case
    found: dict[str, list[Record]] = {"alone": [], "turns": [], "limited": []}
    with tempfile.TemporaryDirectory() as folder:
        files = {way: Path(folder, way) for way in found}
        limit = 0
        for _ in range(rounds):
            for way, calls in found.items():
                options: tuple[str, ...] = {
                    "alone": (),
                    "turns": ("--parts", parts),
                    "limited": ("--parts", parts, "--memory", str(limit)),
                }[way]
                calls.append(call(work, size, "--dtype", dtype, "--save", str(files[way]), *options))
                limit = limit or int(share * needed(calls[0]))
        numbers = {way: torch.load(file, weights_only=True) for way, file in files.items()}
    record: Record = {"work": case.name, "size": size, "parts": parts, "limit": limit}
    for way, calls in found.items():
        record[way] = {
            "memory": median(map(needed, calls)),
            "seconds": median(one["seconds"] for one in calls),
            "error": error(numbers[way], numbers["alone"]),
        }
    return record


def needed(one: Record) -> int:
    """The memory of a call, weights included."""
    return int(one["memory"] + one["weights"])


def error(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """The largest difference, relative to the largest value of its tensor, or to a thousandth of that of all."""
    largest = {name: float(value.abs().max()) for name, value in right.items()}
    least = 1e-3 * max(largest.values())
    return max(float((found[name] - value).abs().max()) / max(largest[name], least) for name, value in right.items())


def table(records: list[Record]) -> Table:
    """A row per call."""

    def row(record: Record) -> tuple[str, ...]:
        alone, turns, limited = (record[way] for way in ("alone", "turns", "limited"))
        cells = [record["work"], str(record["size"]), record["parts"], _mib(alone["memory"])]
        for way in (turns, limited):
            cells += [_mib(way["memory"]), f"{way['memory'] / alone['memory']:.2f}"]
        cells += [f"{alone['seconds']:.1f}", *(f"{way['seconds'] / alone['seconds']:.2f}" for way in (turns, limited))]
        return *cells, f"{max(turns['error'], limited['error']):.0e}"

    headings = (
        "call", "size", "parts", "one process, MiB", "in turn, MiB", "part", "limited, MiB", "part", "seconds alone",
        "times", "times, limited", "error",
    )  # fmt: skip
    return Table("One process, parts in turn, and parts in turn within a limit", headings, [row(r) for r in records])


def _mib(count: float) -> str:
    return f"{count / 2**20:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="WORK")
    parser.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    parser.add_argument("--again", action="store_true", help="measure again what has been measured")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where results are kept")
    options = parser.parse_args()
    file = options.results / f"{RESULT}.json"
    kept: dict[str, Record] = {r["work"]: r for r in json.loads(file.read_text())} if file.exists() else {}
    for work in tqdm([work for work in options.only if options.again or work not in kept], unit="call"):
        kept[work] = measured(CASES[work], options.rounds)
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps([kept[name] for name in CASES if name in kept], indent=1) + "\n")
    records = [kept[name] for name in CASES if name in kept]
    shown = [table(records)]
    show(shown)
    if options.results == RESULTS:
        save(RESULT, "Parts in turn", ABOUT, shown, records)


if __name__ == "__main__":
    main()
