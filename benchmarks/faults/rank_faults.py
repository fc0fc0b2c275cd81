"""One rank of a training script killed at a random moment, under every launcher: what becomes of the job.

    python benchmarks/faults/rank_faults.py                        # 50 moments of each way; goes on where it stopped
    python benchmarks/faults/rank_faults.py --moments 2            # about two minutes
    python benchmarks/faults/rank_faults.py --way "run, Gloo"      # one way only; may be given again
    python benchmarks/faults/rank_faults.py --save                 # keeps table and figures in benchmarks/results

A way is a launcher (`distconv run` itself, torchrun, mpiexec) and what carries the messages (Gloo, MPI). A small
network trains on two ranks, in every fifth job on four, and keeps a checkpoint of each step. At a moment that is drawn
by number and --seed one rank gets signal 9: in three of ten jobs between the start of the ranks' processes and the
first step, in the others within some step of the training. Then

    all other processes of the job must have ended within 10 s, wherever they went,
    the launcher's exit code must not be 0,
    no temporary file may be left,
    and the same script, started anew on 4, 2 or 1 ranks in turn, must go on from its checkpoint to the losses of one
    process (relative difference at most 1e-9), so that no step is missing.

Linux. The exit code is 1 where one of these does not hold.
"""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tqdm import tqdm

from benchmarks.faults.watched_job import WAYS, WatchedJob, alone, command
from benchmarks.harness import ROOT, Records, finish, parser
from benchmarks.table import RESULTS, Table

STEPS, PAUSE = 40, "0.02"
END_SECONDS, MOST_SECONDS, AGAIN_SECONDS = 10.0, 60.0, 300.0
TOLERANCE = 1e-9
STARTING, STEP_SECONDS = 0.3, 0.03
"""The share of jobs of which a rank is killed before the first step; about what a step takes."""

ANEW = (4, 2, 1)
"""On how many ranks the script is started anew, in turn."""


@dataclass(frozen=True)
class Trial:
    """What became of a job of which a rank was killed.

    Attributes:
        way, number, seed: which job.
        ranks: of the job.
        step: how many steps were printed when the rank was killed.
        seconds: until no process of the job was left; infinite where some were after a minute.
        code: the launcher's exit code; None where it had not ended by then.
        left: temporary files.
        told: lines of distconv.
        anew: on how many ranks the script was started anew.
        code_anew: its exit code.
        missing: steps whose loss neither run has printed.
        difference: the largest relative one of a loss from that of one process.
    """

    way: str
    number: int
    seed: int
    ranks: int
    step: int
    seconds: float
    code: int | None
    left: list[str]
    told: list[str]
    anew: int
    code_anew: int | None
    missing: int
    difference: float

    def faults(self) -> list[str]:
        """What is not as it should be."""
        checks = {
            f"processes were left after {END_SECONDS:g} s": self.seconds > END_SECONDS,
            f"exit code {self.code}": self.code in (0, None),
            f"left: {', '.join(self.left)}": bool(self.left),
            f"anew on {self.anew}: exit code {self.code_anew}": self.code_anew != 0,
            f"anew on {self.anew}: {self.missing} steps missing": self.missing > 0,
            f"anew on {self.anew}: losses differ by {self.difference:.1e}": not self.difference <= TOLERANCE,
        }
        return [fault for fault, is_so in checks.items() if is_so]


def script(checkpoint: Path) -> list[str]:
    steps = ["--steps", str(STEPS), "--pause", PAUSE, "--checkpoint", str(checkpoint)]
    return [str(ROOT / "benchmarks/faults/resuming.py"), *steps]


def seconds_of(way: str, ranks: int) -> float:
    """From the start of the ranks' processes to the first step of a job that is left alone."""
    with tempfile.TemporaryDirectory() as folder, WatchedJob(command(way, ranks, script(Path(folder, "state")))) as job:
        if not job.await_ranks(ranks):
            raise RuntimeError(f"{way}: no ranks: {(job.folder / 'errors').read_text()[-2000:]}")
        begin = time.monotonic()
        while not job.losses() and job.process.poll() is None:
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        if job.await_end(MOST_SECONDS) == math.inf or job.process.returncode:
            raise RuntimeError(f"{way} without a fault: {(job.folder / 'errors').read_text()[-2000:]}")
        return seconds


def difference(found: Mapping[int, float], expected: Mapping[int, float]) -> float:
    return max((abs(loss - expected[step]) / abs(expected[step]) for step, loss in found.items()), default=0.0)


def trial(way: str, number: int, seed: int, seconds: float, expected: Mapping[int, float]) -> Trial | None:
    """Kills a rank, in the start, which takes so many seconds, or in a step; None where the job had ended before."""
    random = Random(f"{seed} {way} {number}")
    ranks, anew = 4 if number % 5 == 4 else 2, ANEW[number % len(ANEW)]
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder, "state")
        with WatchedJob(command(way, ranks, script(checkpoint))) as job:
            if not job.await_ranks(ranks):
                raise RuntimeError(f"{way}: no ranks: {(job.folder / 'errors').read_text()[-2000:]}")
            step = 0 if random.random() < STARTING else random.randint(1, STEPS - 1)
            while len(job.losses()) < step and job.process.poll() is None:
                time.sleep(0.002)
            time.sleep(random.uniform(0, STEP_SECONDS if step else seconds))
            running = job.ranks()
            if len(running) < ranks:
                return None
            os.kill(running[random.randrange(ranks)], signal.SIGKILL)
            ended = job.await_end(MOST_SECONDS)
            found, code, left, told = job.losses(), job.process.poll(), job.left(), job.told()
        with WatchedJob(command(way if anew > 1 else "run, Gloo", anew, script(checkpoint))) as again:
            again.await_end(AGAIN_SECONDS)
            after, code_anew = again.losses(), again.process.poll()
    missing = STEPS - len(found | after)
    apart = max(difference(found, expected), difference(after, expected))
    return Trial(way, number, seed, ranks, len(found), ended, code, left, told, anew, code_anew, missing, apart)


def measure(ways: Sequence[str], options: argparse.Namespace, kept: Records) -> None:
    """Adds trials to what is kept."""
    todo = [(way, n) for n in range(options.moments) for way in ways if (way, n, options.seed) not in kept.found]
    expected = alone(STEPS) if todo else {}
    seconds: dict[tuple[str, int], float] = {}
    with tqdm(todo, unit="kill", disable=None) as bar:
        for way, number in bar:
            key = way, 4 if number % 5 == 4 else 2
            if key not in seconds:
                seconds[key] = seconds_of(*key)
            each = None
            for attempt in range(5):
                each = each or trial(way, number, options.seed + 1000 * attempt, seconds[key], expected)
            if each is None:
                bar.write(f"{way} {number}: the job had ended before its moment, five times")
                continue
            each = Trial(**asdict(each) | {"seed": options.seed})
            kept.add(asdict(each))
            if each.faults():
                bar.write(f"{way} {number}: {'; '.join(each.faults())}; told: {each.told}")


def table(found: Sequence[Trial]) -> Table:
    """A row for each way."""
    rows = []
    for way in dict.fromkeys(each.way for each in found):
        of_way = [each for each in found if each.way == way]
        seconds = sorted(each.seconds for each in of_way)
        named = sum(any("was killed (signal 9)" in line for line in each.told) for each in of_way)
        rows.append((
            way, str(len(of_way)), str(sum(each.step > 0 for each in of_way)), f"{seconds[len(seconds) // 2]:.1f}",
            f"{seconds[-1]:.1f}", str(named), str(sum(bool(each.left) for each in of_way)),
            f"{max(each.difference for each in of_way):.0e}", str(sum(bool(each.faults()) for each in of_way)),
        ))  # fmt: skip
    headings = (
        "way", "kills", "while training", "all ended after, s (median)", "at most", "killed rank named",
        "left files", "losses differ by", "faults",
    )  # fmt: skip
    return Table("A rank killed at a random moment", headings, rows)


def main() -> int:
    """Runs the trials that are missing and prints all; the exit code."""
    made = parser(__doc__, "rank-faults")
    made.add_argument("--moments", type=int, default=50, help="kills of each way, earlier ones too (%(default)s)")
    made.add_argument("--way", choices=WAYS, action="append", help="launcher and backend (default: all)")
    made.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    made.add_argument("--partial", type=Path, default=RESULTS / "rank-faults-partial.jsonl", help="what is kept")
    options = made.parse_args()
    kept = Records(options.partial, "way", "number", "seed")
    measure(options.way or WAYS, options, kept)
    trials = [Trial(**record) for record in kept.found.values() if record["seed"] == options.seed]
    trials.sort(key=lambda each: (WAYS.index(each.way), each.number))
    finish(options, "rank-faults", "A rank killed at a random moment", __doc__, [table(trials)])
    faulty = [each for each in trials if each.faults()]
    for each in faulty:
        print(f"{each.way} {each.number}: {'; '.join(each.faults())}")
    return int(bool(faulty))


if __name__ == "__main__":
    sys.exit(main())
