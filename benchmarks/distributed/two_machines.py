"""A job on two hosts: equal results, and both sides end when the network between them is cut.

    python benchmarks/distributed/two_machines.py [--save]

The hosts are network namespaces with addresses, names, temporary files and caches of their own, joined by a link of
1 ms and 1 Gbit/s that `two_hosts.py` carries; Linux, as root. Scripts and data are all that they share. The brain
script, a 3-D U-Net in float64, runs on two ranks of each host, started by torchrun and by mpiexec. Then it is started
once more, the link is cut in the middle, and it is timed how long both sides take to end. The exit code is 1 where a
loss differs by more than 1e-10, or where a side takes longer than 15 s to end or leaves something behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.distributed.two_hosts import LEFT, Host, Link, missing, two_hosts
from benchmarks.table import Table, conditions, save, show

ABOUT = (
    "`python benchmarks/distributed/two_machines.py --save`: the brain script on two ranks of each of two network "
    "namespaces, joined by a link of 1 ms and 1 Gbit/s; the loss beside that of one process, and "
    "what happens when the link is cut."
)
PARTITION = "sample=1,depth=2,height=2"
SCRIPT = ("benchmarks/demo/brain_volume.py", "--size", "16x20x16", "--dtype", "float64", "--width", "4")
PORT, RANKS = "29511", 2
TOLERANCE, END_SECONDS, START_SECONDS = 1e-10, 15.0, 300.0
LAUNCHER_SECONDS = 10.0  # what a launcher gets to end after its ranks have
WAYS = ("torchrun", "mpiexec")


@dataclass(frozen=True)
class Trial:
    """What became of a job.

    Attributes:
        way: its launcher.
        what: whether the link was cut.
        codes: exit codes of the launchers; None for one that had to be killed.
        seconds: until the ranks of each host had ended, from the start, or from the cut.
        difference: of the last loss from that of one process; None where the link was cut.
        lines: what distconv told on each host.
        left: temporary files that are left, where the launcher ended by itself.
        carried: bytes over the link, both ways.
    """

    way: str
    what: str
    codes: list[int | None]
    seconds: list[float]
    difference: float | None
    lines: list[list[str]]
    left: list[str]
    carried: int

    def fault(self) -> str:
        """What is wrong; "" where nothing is."""
        if self.left:
            return ", ".join(self.left)
        if self.difference is not None:
            return "" if not any(self.codes) and self.difference <= TOLERANCE else "the losses differ, or it failed"
        if 0 in self.codes or max(self.seconds) > END_SECONDS:
            return f"not ended within {END_SECONDS:g} s"
        if not all(len(each) == 1 for each in self.lines):
            return "not one line from each launcher"
        return "its launcher did not end by itself" if None in self.codes else ""


@contextlib.contextmanager
def started(way: str, hosts: tuple[Host, Host], script: Sequence[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """A job on two ranks of each host: the launchers that a user starts. Ended with the context."""
    run = ["-m", "distconv", "run", "--partition", PARTITION, *script]
    with contextlib.ExitStack() as around:
        if way == "torchrun":
            commands = [
                (host, [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number)])
                for number, host in enumerate(hosts)
            ]
            meeting = ["--nproc-per-node", str(RANKS), "--master-addr", hosts[0].address, "--master-port", PORT]
            commands = [(host, [*command, *meeting, *run]) for host, command in commands]
        else:
            names = ",".join(f"{host.name}:{RANKS}" for host in hosts)
            remote = around.enter_context(_remote_shell(hosts))
            mpiexec = [str(Path(sys.executable).with_name("mpiexec")), "-launcher", "ssh", "-launcher-exec", remote]
            commands = [(hosts[0], [*mpiexec, "-hosts", names, "-n", str(2 * RANKS), sys.executable, *run])]
        processes = [
            subprocess.Popen(
                host.command(*command),
                env=host.environment(),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for host, command in commands
        ]
        try:
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _remote_shell(hosts: Sequence[Host]) -> Iterator[str]:
    """What mpiexec starts its helpers with, in place of ssh: OPTIONS HOST COMMAND, run on the host of that name."""
    cases = "".join(f'{host.name}) set -- {shlex.join(host.command())} sh -c "$*" ;;\n' for host in hosts)
    options = 'while [ "${1#-}" != "$1" ]; do shift; done'
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "remote")
        path.write_text(f'#!/bin/sh\n{options}\nhost=$1; shift\ncase $host in\n{cases}esac\nexec "$@"\n')
        path.chmod(0o755)
        yield str(path)


def trial(way: str, cut: bool, expected: float) -> Trial:
    """Runs the script on two hosts, and cuts the link after some steps where that is asked for."""
    with two_hosts(delay=0.001, rate=1e9) as (hosts, link), tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        steps = ("--steps", "100000") if cut else ("--steps", "4", "--json", str(record))
        begin = time.monotonic()
        with started(way, hosts, [*SCRIPT, *steps]) as processes:
            if cut:
                _wait_for_steps(link, processes)
                link.cut()
                begin = time.monotonic()
            texts, seconds, ended = _ended(processes, hosts, begin, cut)
            codes = [process.poll() if own else None for process, own in zip(processes, ended, strict=True)]
        left = [line for text in texts for line in text.splitlines() if line.startswith(LEFT)]
        lines = [[line for line in text.splitlines() if line.startswith("distconv:")] for text in texts]
        difference = None
        if not cut:
            difference = abs(json.loads(record.read_text())["losses"][-1] - expected) if record.exists() else math.inf
        return Trial(way, "cut" if cut else "whole", codes, seconds, difference, lines, left, sum(link.bytes))


def _wait_for_steps(link: Link, processes: Sequence[subprocess.Popen[str]]) -> None:
    """Returns when the ranks train, for messages have come for five seconds without a pause, or when one has ended."""
    busy, begin = 0, time.monotonic()
    while busy < 10 and all(process.poll() is None for process in processes):
        before = sum(link.bytes)
        time.sleep(0.5)
        busy = busy + 1 if sum(link.bytes) > before + 10_000 else 0
        if time.monotonic() - begin > START_SECONDS:
            raise TimeoutError(f"no steps within {START_SECONDS:g} s")


def _ended(
    processes: Sequence[subprocess.Popen[str]], hosts: Sequence[Host], begin: float, cut: bool
) -> tuple[list[str], list[float], list[bool]]:
    """What the launchers printed, when each host's ranks had ended, and whether each launcher had ended soon after.

    At most START_SECONDS are waited for the ranks.
    """
    texts: list[list[str]] = [[] for _ in processes]

    def read(number: int) -> None:
        texts[number] += processes[number].stdout or ()

    readers = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(len(processes))]
    for reader in readers:
        reader.start()
    seconds: dict[int, float] = {}
    if not cut:  # the launchers have only begun
        _wait_for_ranks(hosts, processes)
    while len(seconds) < len(hosts) and time.monotonic() - begin < START_SECONDS:
        for number, host in enumerate(hosts):
            if number not in seconds and not host.ranks():
                seconds[number] = round(time.monotonic() - begin, 1)
        time.sleep(0.1)
    ended = []
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(LAUNCHER_SECONDS)
        ended.append(process.poll() is not None)
        process.kill()
    for host in hosts:
        host.end()
    for reader in readers:
        reader.join()
    return ["".join(text) for text in texts], [seconds.get(number, math.inf) for number in range(len(hosts))], ended


def _wait_for_ranks(hosts: Sequence[Host], processes: Sequence[subprocess.Popen[str]]) -> None:
    while not all(host.ranks() for host in hosts) and all(process.poll() is None for process in processes):
        time.sleep(0.1)


def alone() -> float:
    """The last loss of the script in one process."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder, "record.json")
        command = [sys.executable, *SCRIPT, "--steps", "4", "--json", str(record)]
        subprocess.run(
            command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        return float(json.loads(record.read_text())["losses"][-1])


def _row(found: Trial) -> tuple[str, ...]:
    told = "; ".join(line.removeprefix("distconv: ") for lines in found.lines for line in lines)
    difference = "" if found.difference is None else f"{found.difference:.1e}"
    codes, seconds = (", ".join(map(str, each)) for each in (found.codes, found.seconds))
    carried = f"{found.carried / 1e6:.1f}"
    return found.way, found.what, codes, seconds, difference, told, carried, found.fault() or "none"


def main() -> int:
    """Runs all trials and prints them; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--way", choices=WAYS, action="append", help="the launcher (default: both)")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args()
    if reason := missing():
        print(f"two_machines: {reason}", file=sys.stderr)
        return 2
    told = conditions()
    expected = alone()
    trials = []
    for way in options.way or WAYS:
        for cut in (False, True):
            trials.append(trial(way, cut, expected))
            print(trials[-1], flush=True)
    table = Table(
        "Two machines",
        ("launcher", "link", "exit codes", "ended after, s", "difference of the loss", "told", "MB carried", "fault"),
        [_row(each) for each in trials],
    )
    show([table])
    if options.save:
        save("two-machines", "A job on two hosts", f"{ABOUT} {told}", [table])
    return int(any(each.fault() for each in trials))


if __name__ == "__main__":
    sys.exit(main())
