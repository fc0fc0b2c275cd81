"""Slow and skewed ranks: messages that leave late, and processes that are stopped for a while. Same bits, no hang.

    python benchmarks/faults/slow_ranks.py            # about four minutes
    python benchmarks/faults/slow_ranks.py --draws 5 --jobs 1
    python benchmarks/faults/slow_ranks.py --save     # keeps table and figures in benchmarks/results

*Late messages*: a process group hands the operations of one rank, drawn anew for every training of four steps, on to
Gloo or MPI up to 20 ms late each, in their order, while the rank itself goes on until it needs what they bring.
*Stopped ranks*: the processes of a job's ranks are stopped and let go on at random (SIGSTOP, SIGCONT), up to half a
second each time, under every launcher. Losses, gradients and parameters must have the bits that they have without.

*Told*: a rank is stopped for ten seconds with `--slow-after 3`. Exactly one line must name the rank that the others
wait for, and the job must end as if nothing had happened.

Linux. The exit code is 1 where a bit differs, a job fails or does not end, or the line is not told.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm

from benchmarks.faults.watched_job import WAYS, WatchedJob, command
from benchmarks.table import Table, conditions, save, show
from distconv.job.launcher import mpiexec

PARTITIONS = ("height=2", "sample=2,height=2", "height=2,width=2", "sample=2,channel=2")
MILLISECONDS = "20"
STEPS, STOPPED_SECONDS = 60, 0.5
SLOW_AFTER, TOLD_SECONDS = "3", 10.0
MOST_SECONDS = 300.0

Figures = dict[str, Any]


def late(backend: str, partition: str, draws: int, seed: int) -> Figures:
    """Trainings with late messages: how many ranks had other bits, and how many messages were late."""
    ranks = 2 if partition.count("=") == 1 else 4
    rest = [partition, str(draws), MILLISECONDS, str(seed)]
    program = [sys.executable, str(ROOT / "benchmarks/faults/late_rank.py"), backend]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as around:
        if backend == "mpi":
            commands = [[*mpiexec(ranks), *program, *rest]]
        else:
            store = os.path.join(folder, "store")
            commands = [[*program, str(rank), str(ranks), store, *rest] for rank in range(ranks)]
        processes = [
            around.enter_context(subprocess.Popen(each, env=environment, stdout=subprocess.PIPE, text=True))
            for each in commands
        ]
        figures: Figures = {"what": f"late messages, {backend}", "where": partition, "trials": draws}
        try:
            for process in processes:
                process.wait(MOST_SECONDS)
        except subprocess.TimeoutExpired:
            return figures | {"fault": f"not ended within {MOST_SECONDS:g} s"}
        finally:
            for process in processes:
                process.kill()
        assert processes[0].stdout is not None
        printed = processes[0].stdout.read().splitlines()
        if any(process.returncode for process in processes) or not printed:
            return figures | {"fault": f"exit codes {[process.returncode for process in processes]}"}
        figures |= json.loads(printed[-1])
        return figures | {"fault": f"{figures['unlike']} with other bits" if figures["unlike"] else ""}


def script() -> list[str]:
    return [str(ROOT / "benchmarks/faults/resuming.py"), "--steps", str(STEPS), "--pause", "0.02"]


def plain(way: str) -> dict[int, float]:
    """The losses of a job that is left alone."""
    with WatchedJob(command(way, 2, script())) as job:
        if job.await_end(MOST_SECONDS) == float("inf") or job.process.returncode:
            raise RuntimeError(f"{way}: {(job.folder / 'errors').read_text()[-2000:]}")
        return job.losses()


def stopped(way: str, number: int, seed: int, expected: Mapping[int, float]) -> Figures:
    """A job whose ranks are stopped at random until it ends."""
    random = Random(f"{seed} {way} {number}")
    count = 0
    with WatchedJob(command(way, 2, script())) as job:
        begin = time.monotonic()
        while job.process.poll() is None and time.monotonic() - begin < MOST_SECONDS:
            ranks = job.ranks()
            if len(ranks) == 2 and (0 < len(job.losses()) < STEPS):
                _stop(random.choice(ranks), random.uniform(0.01, STOPPED_SECONDS))
                count += 1
            time.sleep(random.uniform(0.01, 0.1))
        fault = _fault(job, expected)
    return {"what": "stopped ranks", "where": way, "late": count, "fault": fault}


def told(way: str, expected: Mapping[int, float]) -> Figures:
    """A job of which the last rank is stopped for so long that a line tells of it."""
    lines: list[str] = []
    with WatchedJob(command(way, 2, script(), ["--slow-after", SLOW_AFTER])) as job:
        ranks = job.await_ranks(2)
        while job.process.poll() is None and len(job.losses()) < 10:
            time.sleep(0.02)
        if len(ranks) == 2 and job.process.poll() is None:
            _stop(job.ranks()[-1], TOLD_SECONDS)
        job.await_end(MOST_SECONDS)
        fault, lines = _fault(job, expected), job.told()
    wanted = r"\w+ among ranks 0 and 1 .*has waited \d+ s for rank [01], not answering"
    if not fault and not (len(lines) == 1 and re.fullmatch(wanted, lines[0])):
        fault = f"told: {lines}"
    return {"what": "told", "where": way, "trials": 1, "late": 1, "told": lines, "fault": fault}


def _stop(process: int, seconds: float) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(process, signal.SIGCONT)


def _fault(job: WatchedJob, expected: Mapping[int, float]) -> str:
    code = job.process.poll()
    if code is None:
        return f"not ended within {MOST_SECONDS:g} s"
    if code:
        return f"exit code {code}: {job.told()}"
    return "" if job.losses() == expected else "losses with other bits"


def main() -> int:
    """Runs all trials and prints them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=25, help="trainings of each group and partition (%(default)s)")
    parser.add_argument(
        "--jobs", type=int, default=3, help="jobs of each launcher whose ranks are stopped (%(default)s)"
    )
    parser.add_argument("--way", choices=WAYS, action="append", help="launcher and backend (default: all)")
    parser.add_argument("--backend", choices=("gloo", "mpi"), action="append", help="of late messages (default: both)")
    parser.add_argument("--partition", choices=PARTITIONS, action="append", help="of late messages (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the delays (%(default)s)")
    parser.add_argument("--save", action="store_true", help="write table and figures to benchmarks/results")
    options = parser.parse_args()
    about, ways = conditions(), options.way or WAYS
    backends, partitions = options.backend or ("gloo", "mpi"), options.partition or PARTITIONS
    found: list[Figures] = []
    with tqdm(total=len(backends) * len(partitions) + len(ways) * (options.jobs + 1), disable=None) as bar:

        def done(figures: Figures) -> None:
            found.append(figures)
            bar.update()
            if figures["fault"]:
                bar.write(f"{figures['what']}, {figures['where']}: {figures['fault']}")

        if options.draws:
            for backend in backends:
                for partition in partitions:
                    done(late(backend, partition, options.draws, options.seed))
        for way in ways if options.jobs else ():
            expected = plain(way)
            for number in range(options.jobs):
                done(stopped(way, number, options.seed, expected) | {"trials": 1})
            done(told(way, expected))
    rows = []
    for what, where in dict.fromkeys((each["what"], each["where"]) for each in found):
        group = [each for each in found if (each["what"], each["where"]) == (what, where)]
        late_count, trials = (sum(each.get(name, 0) for each in group) for name in ("late", "trials"))
        faults = sum(bool(each["fault"]) for each in group)
        rows.append((what, where, str(trials), str(late_count), str(faults)))
    shown = Table("Slow ranks", ("what", "where", "trainings", "delays", "with a fault"), rows)
    show([shown])
    for each in found:
        for line in each.get("told", ()):
            print(f"told, {each['where']}: {line}")
    if options.save:
        save("slow-ranks", "Slow and skewed ranks", f"{__doc__}\n{about}", [shown])
    return int(any(each["fault"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
