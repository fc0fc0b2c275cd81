"""Jobs of `distconv run`, started as a user starts them, and what they leave behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from distconv.job.launcher import mpiexec
from tests.forked_python import MARK, NAME_LENGTH, forked_python

START_SECONDS = 180  # until the script runs on every rank
GRACE_SECONDS = 10  # within which a job ends after one of its ranks has
SLOW = 6  # how much longer that may take on a machine that is busy with other things

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "tests" / "distconv" / "scripts"
TRAIN = str(SCRIPTS / "train.py")
SUPPORT = str(Path(__file__).parent)
ENVIRONMENT = {
    **{
        name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "DISTCONV", "MUCUDNN"))
    },
    "PYTHONPATH": str(ROOT),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DISTCONV_SLOW_AFTER": "never",  # on a busy machine ranks may be late, which is not what most tests are about
}


def _mpi() -> bool:
    try:
        return importlib.util.find_spec("mpi4py") is not None and bool(mpiexec(1))
    except FileNotFoundError:
        return False


needs_mpi = pytest.mark.skipif(not _mpi(), reason="mpi4py or mpiexec is missing")
WAYS = [
    pytest.param("alone", id="alone"),
    pytest.param("mpiexec", id="mpiexec", marks=needs_mpi),
    pytest.param("torchrun", id="torchrun"),
]


def command(way: str, ranks: int, *arguments: str, fresh: bool = False) -> list[str]:
    """What starts a job.

    fresh: whether its processes are started as a user starts them, for tests of that very start. Otherwise they are
    forked from one that has imported what they need; but not under mpiexec, which may kill the stand-in of a process
    before that has told its exit code.
    """
    run = ["-m", "distconv", "run", *arguments]
    python = sys.executable if fresh or way == "mpiexec" else forked_python()
    if way == "torchrun":
        return [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *run]
    return [*(mpiexec(ranks) if way == "mpiexec" else ()), python, *run]


def launch(
    way: str, ranks: int, *arguments: str, seconds: int = 240, fresh: bool = False, **environment: str
) -> subprocess.CompletedProcess[str]:
    """What a job prints; fresh as in `command`."""
    return subprocess.run(
        command(way, ranks, *arguments, fresh=fresh),
        env={**ENVIRONMENT, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )


class Job:
    """A job in a session of its own, whose processes have a mark in their environment, whoever their parent is."""

    def __init__(self, command: list[str], temporary: Path, **environment: str) -> None:
        self._mark = uuid.uuid4().hex
        self._temporary = temporary
        self.process = subprocess.Popen(
            command,
            env={**ENVIRONMENT, MARK: self._mark, "TMPDIR": str(temporary), **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=hear_interrupts,
        )

    def await_line(self, line: str) -> None:
        """Reads what the job prints, up to this line."""
        assert self.process.stdout is not None
        assert any(printed.strip() == line for printed in self.process.stdout), self.process.communicate(timeout=60)

    def end(self) -> tuple[int, str, str]:
        """Its exit code, and what it printed from now on, once it ends by itself. Nothing of it may be left."""
        printed, errors = self.process.communicate(timeout=START_SECONDS + GRACE_SECONDS * SLOW)
        self.await_nothing_left()
        left = [name for name in os.listdir(self._temporary) if not name.startswith("torch")]  # torch leaves caches
        assert left == [], left
        return self.process.returncode, printed, errors

    def await_nothing_left(self) -> None:
        deadline = time.monotonic() + GRACE_SECONDS * SLOW
        while left := self.processes():
            assert time.monotonic() < deadline, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
            time.sleep(0.1)

    def processes(self) -> list[int]:
        """Those that run."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                environment, name = (process / "environ").read_bytes(), (process / "comm").read_text().strip()
                # What has ended, but is not waited for yet, has no environment.
                if f"{MARK}={self._mark}".encode() in environment or (environment and name == self._mark[:NAME_LENGTH]):
                    found.append(int(process.name))
        return found


@contextlib.contextmanager
def started(command: list[str], temporary: Path, **environment: str) -> Iterator[Job]:
    """A job that is killed where the test leaves it."""
    job = Job(command, temporary, **environment)
    try:
        yield job
    finally:
        for pid in job.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def hear_interrupts() -> None:
    """A shell's background job, and all it starts, ignores interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
