"""Parts in turn beside one process: the memory, the seconds and the numbers of decoders and of a training step.

    python benchmarks/turns/turns.py
    python benchmarks/turns/turns.py --only AutoencoderKL UNet3d --rounds 1 --save    # beside the others that are kept

Each call is made by `call.py`, beside this file, in a process of its own: in one process, in eight parts in turn, and
in these parts within a limit of memory, which is a share of what one process needs. The ways follow each other, round
after round; shown are medians. Results are kept after every call; a later run goes on from there.

It needs the extra `models`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.harness import Record, child, finish, joined, parser
from benchmarks.table import Table

RESULT = "turns-cpu"
CALL = str(Path(__file__).with_name("call.py"))
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


def measured(case: Case, rounds: int) -> Record:
    """One call in all ways."""
    work, size, dtype, parts, share = case
    found: dict[str, list[Record]] = {"alone": [], "turns": [], "limited": []}
    with tempfile.TemporaryDirectory() as folder:
        files = {way: Path(folder, way) for way in found}
        limit = 0
        for _ in range(rounds):
            for way, calls in found.items():
                given = ("--parts", parts, "--memory", str(limit))[: {"alone": 0, "turns": 2, "limited": 4}[way]]
                words = work, "--size", str(size), "--dtype", dtype, "--keep", str(files[way]), *given
                calls.append(child(CALL, *words))
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
    made = parser(__doc__, RESULT)
    made.add_argument("--only", nargs="+", default=list(CASES), choices=CASES, metavar="WORK")
    made.add_argument("--rounds", type=int, default=3, help="(default %(default)s)")
    options = made.parse_args()
    records = [measured(CASES[work], options.rounds) for work in tqdm(options.only, unit="call")]
    if options.save:
        records = joined(RESULT, records, "work")
    finish(options, RESULT, "Parts in turn", ABOUT, [table(records)], records)


if __name__ == "__main__":
    main()
