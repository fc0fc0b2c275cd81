"""What distributing costs and saves on this machine: distconv on 2 and 4 ranks beside one process.

    python benchmarks/distributed/distributed.py                    # everything, about ten minutes on two cores
    python benchmarks/distributed/distributed.py --only conv-small  # a case, or: memory, traffic, channels
    # (traffic is that of the cases named beside it, else of all)

One thread per rank. What is shown are medians of milliseconds of forward + backward, the gradients' allreduce
included. The arms take turns, so that a busy moment of the machine meets all of them:

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

import importlib.util
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.distributed.cases import CASES
from benchmarks.distributed.rank import Rank
from benchmarks.harness import Record, finish, parser
from benchmarks.process import Process
from benchmarks.rank_pool import RankPool
from benchmarks.table import RESULTS, Table
from distconv.job.launcher import mpiexec

RESULT = "distributed-cpu"
PARTS = (*CASES, "memory", "traffic", "channels")
ARMS = (
    *("one process", "one process, a thread per rank", "one process, compiled", "slab", "slabs at once"),
    *("Gloo", "Gloo, compiled", "MPI", "MPI, compiled"),
)

TOLERANCE = 1e-2
"""The largest relative difference from one process that float32 may show. Rounding can change which side of zero a
ReLU's input lies on, or which element is the maximum. The tests compare in float64."""

TARGET_MEMORY, TARGET_TRAFFIC = 0.28, 196_608


def speed(answer: Record, name: str, ranks: int, transport: str) -> dict[str, float]:
    """The medians of an answer by the names of `ARMS`. SystemExit where the result is off."""
    if not answer["error"] < TOLERANCE:
        raise SystemExit(f"distributed.py: {name} on {ranks} ranks over {transport} is off by {answer['error']:.1e}")
    names = {"distconv": transport, "compiled": f"{transport}, compiled"}
    return {names.get(arm, arm): statistics.median(values) for arm, values in answer["seconds"].items()}


def over_gloo(record: Record, ranks: int, chosen: list[str], seconds: float) -> None:
    pool = RankPool(ranks, Rank)
    cases = [name for name in CASES if name in chosen]

    def ask(*request: Any) -> Any:
        return pool.result(*request)[0]

    for name in cases:
        answer = ask("speed", name, seconds, True)
        row = {"case": name, "ranks": ranks, "partition": CASES[name].partitions[ranks], "error": answer["error"]}
        record["speed"].append({**row, "seconds": speed(answer, name, ranks, "Gloo")})
    if "memory" in chosen and ranks == 4:
        for partition in ("depth=4", "depth=2,height=2"):
            found = ask("memory", "unet", partition)
            record["memory"].append({"case": "unet", "ranks": ranks, "partition": partition, **found})
    if "channels" in chosen:
        record["channels"] += [{"ranks": ranks, **row} for row in ask("channels")]
    if "traffic" in chosen:
        for name in cases or CASES:
            found = ask("traffic", name)
            record["traffic"].append({"case": name, "ranks": ranks, "collectives": found[0], "of_ranks": found})
    pool.close()


def over_mpi(record: Record, ranks: int, chosen: list[str], seconds: float) -> None:
    command = [*mpiexec(ranks), sys.executable, str(Path(__file__).with_name("rank.py"))]
    with Process(f"{ranks} ranks over MPI", [command]) as process:
        for name in (name for name in CASES if name in chosen):
            found = speed(process.ask(do="speed", case=name, seconds=seconds, alone=False), name, ranks, "MPI")
            row = next((row for row in record["speed"] if (row["case"], row["ranks"]) == (name, ranks)), None)
            if row is None:
                row = {"case": name, "ranks": ranks, "partition": CASES[name].partitions[ranks], "seconds": {}}
                record["speed"].append(row)
            row["seconds"] |= {arm: found[arm] for arm in ("MPI", "MPI, compiled") if arm in found}


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f}"


def tables(record: Record) -> list[Table]:
    """A table per question that was measured."""
    found: list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]] = []
    rows: list[tuple[str, ...]] = []
    for row in record["speed"]:
        seconds = row["seconds"]
        over = seconds["Gloo"] - seconds["slab"] if "slab" in seconds else None
        cells = ("-" if each is None else f"{1e3 * each:.2f}" for each in (*map(seconds.get, ARMS), over))
        ratio = f"{seconds['one process'] / seconds['Gloo']:.2f}" if "Gloo" in seconds else "-"
        rows.append((CASES[row["case"]].title, f"{row['ranks']}: {row['partition']}", *cells, ratio))
    headings = ("case", "ranks", *ARMS, "Gloo - slab", "one process / Gloo")
    found.append(("Forward + backward, median milliseconds, one thread per rank", headings, rows))
    rows = [
        (
            f"{CASES[row['case']].title}, {row['partition']}{how}",
            *(_mib(row["whole"]), ", ".join(map(_mib, row[kind]))),
            *(f"{max(row[kind]) / row['whole']:.3f}", _mib(row["parameters"])),
        )
        for row in record["memory"]
        for kind, how in (("shares", ""), ("compiled", ", compiled"))
    ]
    title = f"Peak tensor memory of a step, MiB (target: largest share at most {TARGET_MEMORY} of one process)"
    headings = ("", "one process", "each rank", "largest share", "parameters' gradients at its end")
    found.append((title, headings, rows))
    rows = [
        (f"{CASES[row['case']].title}, {row['ranks']} ranks: {name}", str(calls), f"{moved:,}")
        for row in record["traffic"]
        for name, (calls, moved) in row["collectives"].items()
    ]
    title = f"What rank 0 hands to the transport in a step (target: halo at most {TARGET_TRAFFIC:,} bytes)"
    found.append((title, ("", "calls", "bytes"), rows))
    rows = []
    for row in record["channels"]:
        channels, filters, size = row["layer"]
        name = f"{channels} to {filters} channels, {size}²: {row['algorithm']}, {row['partition']}"
        rows.append((name, f"{row['sent']:,}", f"{row['formula']:,.0f}", f"{row['sent'] / row['formula']:.2f}"))
    found.append(("Bytes that all ranks send in a step of a 3x3 convolution", ("", "sent", "formula", "ratio"), rows))
    return [Table(*each) for each in found if each[-1]]


def main() -> None:
    made = parser(__doc__, RESULT)
    made.add_argument("--only", action="append", choices=PARTS, help="this alone; may be given again (default: all)")
    made.add_argument("--ranks", nargs="+", type=int, choices=(2, 4), default=[2, 4], help="(default: 2 4)")
    every = ["gloo", *["mpi"] * bool(importlib.util.find_spec("mpi4py"))]
    made.add_argument("--transports", nargs="+", choices=("gloo", "mpi"), default=every, help="(default: those there)")
    made.add_argument("--seconds", type=float, default=10.0, help="per case, but 3 rounds at least (default 10)")
    made.add_argument("--json", metavar="FILE", type=Path, help="write all figures there")
    options = made.parse_args()
    record: Record = {kind: [] for kind in ("speed", "memory", "traffic", "channels")}
    jobs = [(ranks, transport) for ranks in options.ranks for transport in sorted(options.transports)]
    for ranks, transport in tqdm(jobs, unit="job", disable=None):
        over = over_gloo if transport == "gloo" else over_mpi
        over(record, ranks, options.only or list(PARTS), options.seconds)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    words = [f"--only {name}" for name in options.only or ()]
    words += ["--ranks", *map(str, options.ranks), "--transports", *options.transports]
    about = f"`python benchmarks/distributed/distributed.py {' '.join(words)} --seconds {options.seconds:g}`"
    kept = json.loads((RESULTS / f"{RESULT}.json").read_text())
    finish(options, RESULT, "What distributing costs on a CPU", about, tables(record), {**kept, **record})


if __name__ == "__main__":
    main()
