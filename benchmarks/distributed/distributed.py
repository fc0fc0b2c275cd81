"""What distributing costs and saves on this machine: distconv on 2 and 4 ranks beside one process.

    python benchmarks/distributed/distributed.py                    # everything, about ten minutes on two cores
    python benchmarks/distributed/distributed.py --only conv-small  # a case, or: fixed, memory, traffic, wide, channels
    # (traffic is that of the cases named beside it, else of all)

One thread per rank. What is shown are medians of milliseconds of forward + backward, the gradients'
allreduce included. The arms take turns, so that a busy moment of the machine meets all of them:

    one process     the whole input, plain torch, one thread, other ranks idle; also with as many threads as there are
                    ranks, which then use as many cores as these do
    slab            one rank's share of the input, plain torch, other ranks idle: what a rank computes anyway
    slabs at once   the same on all ranks at one time: what sharing cores and memory costs, without communication
    Gloo, MPI       distconv; MPI runs after the others, since its waiting ranks keep their cores busy
    compiled        the same by torch.compile in its default mode, compiled before anything is timed (small cases)

All processes keep memory that they free, so that page faults do not fall on one arm by chance.
So (Gloo - slab) is what distribution costs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.distributed import wide as distributed_wide
from benchmarks.distributed.cases import CASES, Case
from benchmarks.distributed.processes import RankProcesses
from benchmarks.distributed.report import RESULT, keep, tables
from benchmarks.process import Failed, Process
from benchmarks.table import conditions, show

Record = dict[str, Any]

PARTS = (*CASES, "fixed", "memory", "traffic", "wide", "channels")
LEAST_ROUNDS, MOST_ROUNDS = 3, 400
TURN_SECONDS = 0.5
"""About how long the arms are measured at a time."""

TOLERANCE = 1e-2
"""The largest relative difference from one process that float32 may show. Rounding can change which side of zero a
ReLU's input lies on, or which element is the maximum. The tests compare in float64."""

SLOW_SECONDS = 30.0
"""Processes whose round takes longer than this are measured in one round only."""


def take_turns(sides: list[tuple[Process, Record]], seconds: float) -> dict[str, list[float]]:
    """Seconds of every arm of every side, a few rounds of one side after a few of the other."""
    found: dict[str, list[float]] = {}
    turn: dict[Process, int] = {}
    for process, request in sides:  # warms up; the time it takes decides how many rounds make a turn
        began = time.perf_counter()
        first = process.ask(**request, rounds=1)
        taken = time.perf_counter() - began
        if taken > SLOW_SECONDS:
            found |= first
        else:
            turn[process] = max(1, min(20, int(TURN_SECONDS / taken)))
    slow = set(found)
    began, rounds = time.perf_counter(), 0
    while turn and (rounds < LEAST_ROUNDS or (rounds < MOST_ROUNDS and time.perf_counter() - began < seconds)):
        for process, request in sides:
            if process in turn:
                for arm, values in process.ask(**request, rounds=turn[process]).items():
                    found.setdefault(arm, []).extend(values)
        rounds = min(len(values) for arm, values in found.items() if arm not in slow)
    return found


def medians(found: dict[str, list[float]]) -> dict[str, float]:
    return {arm: statistics.median(values) for arm, values in found.items()}


def over(found: dict[str, list[float]], arms: Sequence[str], below: Sequence[str]) -> dict[str, dict[str, float]]:
    """By how many seconds each of these arms exceeds each of those below, the median over rounds.

    The difference is taken within a round, because a core may be slow for some seconds: the median of one arm may come
    from such a time and the median of the other not.
    """
    return {
        arm: {base: statistics.median(a - b for a, b in zip(found[arm], found[base], strict=True)) for base in below}
        for arm in arms
    }


def measure_speed(name: str, case: Case, ranks: int, gloo: Process, seconds: float) -> Record:
    """One case on so many ranks over Gloo."""
    wrong = gloo.ask(do="error", case=name)
    if not wrong < TOLERANCE:
        raise Failed(f"{name} on {ranks} ranks is off by {wrong:.1e}")
    found = take_turns([(gloo, {"do": "speed", "case": name, "alone": True})], seconds)
    rounds = {arm: len(values) for arm, values in found.items()}
    return {
        "case": name,
        "ranks": ranks,
        "partition": case.partitions[ranks],
        "error": wrong,
        "seconds": _named(medians(found), "Gloo"),
        "rounds": _named(rounds, "Gloo"),
    }


def _named(arms: dict[str, Any], transport: str) -> dict[str, Any]:
    names = {"distconv": transport, "compiled": f"{transport}, compiled"}
    return {names.get(arm, arm): value for arm, value in arms.items()}


def measure(options: argparse.Namespace) -> Record:
    """Everything that was asked for."""
    chosen = options.only or PARTS
    kinds = ("speed", "fixed", "memory", "traffic", "wide", "channels", "channels_fixed")
    record: Record = {kind: [] for kind in kinds}
    bar = tqdm(total=len(options.ranks) * len(options.transports), unit="run", disable=not sys.stderr.isatty())
    for ranks in options.ranks:
        for transport in options.transports:
            bar.set_description(f"{ranks} ranks, {transport}")
            with RankProcesses(transport, ranks) as processes:
                if transport == "gloo":
                    _over_gloo(record, processes, ranks, chosen, options)
                else:
                    _over_mpi(record, processes, ranks, chosen, options)
            bar.update()
    bar.close()
    return record


def _over_gloo(record: Record, gloo: Process, ranks: int, chosen: list[str], options: argparse.Namespace) -> None:
    cases = [name for name in CASES if name in chosen]
    for name in cases:
        tqdm.write(f"{CASES[name].title}, {ranks} ranks", file=sys.stderr)
        record["speed"].append(measure_speed(name, CASES[name], ranks, gloo, options.seconds))
    if "fixed" in chosen and ranks == 2:
        _fixed(record, gloo, "Gloo", options.seconds)
    if "memory" in chosen and ranks == 4:
        tqdm.write("memory of the 3-D U-Net, 4 ranks", file=sys.stderr)
        for partition in ("depth=4", "depth=2,height=2"):
            found = gloo.ask(do="memory", case="unet", partition=partition)
            record["memory"].append({"case": "unet", "ranks": ranks, "partition": partition, **found})
    if "wide" in chosen and ranks == 4:
        tqdm.write(f"parameters of {distributed_wide.TITLE}, 4 ranks", file=sys.stderr)
        for partition in distributed_wide.PARTITIONS:
            record["wide"].append({"partition": partition, **gloo.ask(do="wide", partition=partition)})
    if "channels" in chosen:
        tqdm.write(f"convolutions over split channels, {ranks} ranks", file=sys.stderr)
        record["channels"] += [{"ranks": ranks, **row} for row in gloo.ask(do="channel_traffic")]
        _channels_fixed(record, gloo, "Gloo", ranks, options.seconds)
    if "traffic" in chosen:
        for name in cases or CASES:
            found = gloo.ask(do="traffic", case=name)
            record["traffic"].append({"case": name, "ranks": ranks, "collectives": found[0], "of_ranks": found})


def _fixed(record: Record, process: Process, transport: str, seconds: float) -> None:
    tqdm.write(f"fixed cost of a convolution, 2 ranks, {transport}", file=sys.stderr)
    found = take_turns([(process, {"do": "fixed", "case": "conv-small"})], seconds)
    more = over(found, ("convolution", "training step"), ("slab", "slabs at once"))
    record["fixed"].append({"transport": transport, "ranks": 2, "seconds": medians(found), "over": more})


def _channels_fixed(record: Record, process: Process, transport: str, ranks: int, seconds: float) -> None:
    if ranks == 2:
        found = take_turns([(process, {"do": "channel_fixed"})], seconds)
        more = over(found, ("convolution",), ("share", "shares at once"))
        row = {"transport": transport, "ranks": ranks, "seconds": medians(found), "over": more}
        record["channels_fixed"].append(row)


def _over_mpi(record: Record, mpi: Process, ranks: int, chosen: list[str], options: argparse.Namespace) -> None:
    for name in (name for name in CASES if name in chosen):
        tqdm.write(f"{CASES[name].title}, {ranks} ranks, MPI", file=sys.stderr)
        found = medians(take_turns([(mpi, {"do": "speed", "case": name, "alone": False})], options.seconds))
        rows = (row for row in record["speed"] if (row["case"], row["ranks"]) == (name, ranks))
        row = next(rows, None)
        if row is None:
            row = {"case": name, "ranks": ranks, "partition": CASES[name].partitions[ranks], "seconds": {}}
            record["speed"].append(row)
        measured = _named(found, "MPI")
        row["seconds"] |= {arm: measured[arm] for arm in ("MPI", "MPI, compiled") if arm in measured}
    if "fixed" in chosen and ranks == 2:
        _fixed(record, mpi, "MPI", options.seconds)
    if "channels" in chosen:
        _channels_fixed(record, mpi, "MPI", ranks, options.seconds)


def numbers(text: str) -> list[int]:
    """ "2,4"."""
    chosen = text.split(",")
    if not set(chosen) <= {"2", "4"}:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted: 2, 4 or 2,4")
    return [int(count) for count in chosen]


def transports(text: str) -> list[str]:
    """ "gloo,mpi"."""
    chosen = text.split(",")
    if not set(chosen) <= {"gloo", "mpi"}:
        raise argparse.ArgumentTypeError(f"{text!r}: accepted: gloo, mpi or gloo,mpi")
    return sorted(chosen)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", action="append", choices=PARTS, help="measure this alone; may be given again (default: everything)"
    )
    parser.add_argument("--ranks", type=numbers, default="2,4", help="(default %(default)s)")
    parser.add_argument(
        "--transports", type=transports, help="gloo, mpi or gloo,mpi (default: gloo, and mpi where mpi4py is)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help=f"per case, but {LEAST_ROUNDS} rounds at least (default %(default)g)",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{RESULT}.*")
    return parser.parse_args()


def command(options: argparse.Namespace) -> str:
    """The command that measures the same again, without the paths of files and interpreters."""
    words = [f"--only {name}" for name in options.only or ()]
    words += [f"--ranks {','.join(map(str, options.ranks))}", f"--transports {','.join(options.transports)}"]
    return " ".join(["python benchmarks/distributed/distributed.py", *words, f"--seconds {options.seconds:g}"])


def main() -> int:
    options = arguments()
    if options.transports is None:
        options.transports = ["gloo", *(["mpi"] if importlib.util.find_spec("mpi4py") else [])]
    before = conditions()
    try:
        record = measure(options)
    except Failed as error:
        print(f"distributed.py: {error}", file=sys.stderr)
        return 1
    record |= {"command": command(options), "conditions": before}
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.save:
        keep(record)
    show(tables(record))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
