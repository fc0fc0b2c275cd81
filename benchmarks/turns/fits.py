"""Calls that fit into memory in parts in turn, and not in one process: that is killed, the parts give the numbers.

    python benchmarks/turns/fits.py                           # everything, and writes the table
    python benchmarks/turns/fits.py --only UNet3d --share 0.6

Each call is made by `call.py`, beside this file: once with all memory, which tells what the whole process needs, then
within a control group of Linux that has less, in one process and in parts. Whoever may make control groups, as a rule
root, can run it. It needs the extra `models`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parents[1]))

import torch
from tqdm import tqdm

from benchmarks.table import Table, save, show
from benchmarks.turns.turns import CASES, Record, command, error, surroundings

RESULT = "turns-fits-cpu"
SHARE = 0.7
"""The memory of the group, of what one process takes with all that belongs to it, such as torch's libraries."""

LIMIT = 0.1
"""The limit of the parts' tensors, of by how much one process grows."""

WORKS = {"AutoencoderKL": 128, "AutoencoderKLWan": 48, "UNet3d": 96}
"""{work: size}, as `call.py` takes them."""

KILLED = -9

ABOUT = f"""\
Decoders of diffusers (narrow, with random weights) and a training step of a 3-D U-Net, within a control group of Linux
whose memory is {SHARE:.0%} of what the whole process needs, torch's libraries included: `python
benchmarks/turns/fits.py`. In one process the kernel kills each of them. In eight parts in turn, whose tensors take at
most {LIMIT:.0%} of what one process grows by, each ends with the numbers of one process that had all memory; the error
is the largest difference, relative to the largest value of its tensor. Files to which tensors leave count in a control
group, too, while the kernel keeps them in memory.
"""


@contextmanager
def group(limit: int) -> Iterator[Path]:
    """A control group of so many bytes, in which no process is yet. OSError where none can be made."""
    old = Path("/sys/fs/cgroup/memory")  # version 1 has a folder for each resource
    folder = (old if old.is_dir() else old.parent) / f"mucudnn-fits-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / ("memory.limit_in_bytes" if old.is_dir() else "memory.max")).write_text(str(limit))
        if not old.is_dir():
            (folder / "memory.swap.max").write_text("0")
        yield folder
    finally:
        folder.rmdir()


def called(work: str, *options: str, within: Path | None = None) -> Record | int:
    """What `call.py` prints, or the exit code of a process that did not end well; in a control group, if given."""
    line = command(work, WORKS[work], *options)
    if within is not None:
        line = ["sh", "-c", 'echo $$ > "$0"/cgroup.procs && exec "$@"', str(within), *line]
    done = subprocess.run(line, env=surroundings(), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        return done.returncode
    found: Record = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(work: str, share: float) -> Record:
    """One call in both ways."""
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, name)) for name in ("whole", "parts")]
        whole = called(work, "--save", files[0])
        if isinstance(whole, int):
            raise SystemExit(f"fits.py: {work} ended with exit code {whole}, with all memory of this machine")
        limit = int(share * whole["peak"])
        parts = ("--parts", CASES[work].parts, "--memory", str(int(LIMIT * whole["memory"])), "--save", files[1])
        with group(limit) as within:
            alone = called(work, within=within)
            turns = called(work, *parts, within=within)
        if isinstance(turns, int):
            raise SystemExit(f"fits.py: in parts {work} ended with exit code {turns} within {limit} bytes")
        numbers = [torch.load(file, weights_only=True) for file in files]
    return {
        "work": work,
        "size": WORKS[work],
        "parts": CASES[work].parts,
        "whole": whole,
        "limit": limit,
        "alone": alone,
        "turns": turns,
        "error": error(numbers[1], numbers[0]),
    }


def table(records: list[Record]) -> Table:
    """A row per call."""

    def ended(found: Any) -> str:
        return "killed" if found == KILLED else f"exit code {found}" if isinstance(found, int) else "right"

    rows = [
        (
            record["work"],
            str(record["size"]),
            record["parts"],
            f"{record['whole']['peak'] / 2**20:.0f}",
            f"{record['limit'] / 2**20:.0f}",
            ended(record["alone"]),
            f"{record['error']:.0e}",
            f"{record['turns']['seconds'] / record['whole']['seconds']:.2f}",
        )
        for record in records
    ]
    headings = (
        "call", "size", "parts", "one process takes, MiB", "there are, MiB", "one process there", "error in turn",
        "times",
    )  # fmt: skip
    return Table("Less memory than one process takes", headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(WORKS), choices=WORKS, metavar="WORK")
    parser.add_argument("--share", type=float, default=SHARE, help="of one process's memory (default %(default)s)")
    options = parser.parse_args()
    try:
        with group(2**30):
            pass
    except OSError as failure:
        raise SystemExit(f"fits.py: no control group can be made: {failure}; accepted: Linux, and who may") from None
    records = [measured(work, options.share) for work in tqdm(options.only, unit="call")]
    shown = [table(records)]
    show(shown)
    if set(options.only) == set(WORKS) and options.share == SHARE:
        save(RESULT, "Where one process does not fit", ABOUT, shown)


if __name__ == "__main__":
    main()
