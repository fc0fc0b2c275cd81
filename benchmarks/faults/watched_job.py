"""A job of `distconv run` under some launcher, whose processes are known wherever they went, and what it leaves."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from distconv.job.launcher import mpiexec

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
LOOK_SECONDS = 0.02

PARTITIONS = {4: "sample=2,height=2", 2: "height=2", 1: "sample=1"}
"""By the number of ranks."""

WAYS = ("run, Gloo", "run, MPI", "torchrun, Gloo", "mpiexec, MPI", "mpiexec, Gloo")
"""Launchers, and what carries the messages."""


def command(way: str, ranks: int, script: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    """What a user types to run a script on so many ranks."""
    launcher, backend = way.split(", ")
    prefix = [sys.executable]
    if launcher == "mpiexec":
        prefix = [*mpiexec(ranks), sys.executable]
    elif launcher == "torchrun":
        prefix += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    run = ["-m", "distconv", "run", "--backend", backend.lower(), "--partition", PARTITIONS[ranks]]
    return [*prefix, *run, *options, *script]


class WatchedJob:
    """A job with a folder of its own for temporary files, and a mark in the environment of all its processes.

    Attributes:
        process: the launcher.
        folder: for temporary files, and what is printed.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._kept = tempfile.TemporaryDirectory(prefix="job-", ignore_cleanup_errors=True)
        self.folder = Path(self._kept.name)
        (self.folder / "temporary").mkdir()
        self._mark = f"MARK_OF_THE_JOB={uuid.uuid4().hex}".encode()
        hidden = ("PMI", "OMPI", "DISTCONV", "MUCUDNN")
        environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        name, value = self._mark.decode().split("=")
        environment |= {name: value, "TMPDIR": str(self.folder / "temporary"), "PYTHONPATH": str(ROOT)}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        with (self.folder / "printed").open("w") as printed, (self.folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=errors,
                start_new_session=True,
            )

    def __enter__(self) -> WatchedJob:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._kept.cleanup()

    def processes(self) -> dict[int, int]:
        """Those that run, with their parents."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self._mark in (entry / "environ").read_bytes().split(b"\0"):
                    # pid (name, which may hold anything) state parent ...
                    found[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        return found

    def ranks(self) -> list[int]:
        """The processes that are ranks, or become some: what started them, or watches them, has children."""
        found = self.processes()
        leaves = sorted(found.keys() - set(found.values()))
        told = {}
        for pid in leaves:
            with contextlib.suppress(OSError):
                told[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return [pid for pid in leaves if b"distconv" in told.get(pid, ())]

    def await_ranks(self, count: int) -> list[int]:
        """The processes of so many ranks, as soon as there are as many; none where the job ends before."""
        end = time.monotonic() + START_SECONDS
        while self.process.poll() is None and time.monotonic() < end:
            if len(found := self.ranks()) == count:
                return found
            time.sleep(LOOK_SECONDS)
        return []

    def await_end(self, seconds: float) -> float:
        """Seconds until no process of the job was left; infinite where that took longer than so many."""
        begin = time.monotonic()
        while self.process.poll() is None or self.processes():
            if time.monotonic() - begin > seconds:
                return float("inf")
            time.sleep(LOOK_SECONDS)
        return time.monotonic() - begin

    def losses(self) -> dict[int, float]:
        """What `resuming.py` has printed so far, by step."""
        lines = [line.split() for line in (self.folder / "printed").read_text().splitlines()]
        return {int(line[0]): float(line[1]) for line in lines if len(line) == 2 and line[0].isdigit()}

    def told(self) -> list[str]:
        """The lines that distconv has told."""
        lines = (self.folder / "errors").read_text().splitlines()
        return [line.removeprefix("distconv: ") for line in lines if line.startswith("distconv: ")]

    def left(self) -> list[str]:
        """Temporary files, but for the caches that torch leaves."""
        return sorted(name for name in os.listdir(self.folder / "temporary") if not name.startswith("torch"))


def alone(steps: int) -> dict[int, float]:
    """The losses of `resuming.py` in one process."""
    command = [sys.executable, str(ROOT / "benchmarks/faults/resuming.py"), "--steps", str(steps)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return {int(step): float(loss) for step, loss in map(str.split, done.stdout.splitlines())}
