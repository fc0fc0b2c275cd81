"""The first fifteen minutes on a GPU: what only a card can tell, the figures that decide most first.

    python3 benchmarks/gpu/fifteen.py --out OUT                   # the first run takes 550 s, a second one 200 s
    python3 benchmarks/gpu/fifteen.py --out OUT --only engines    # a step again
    python3 benchmarks/gpu/fifteen.py --out OUT --device cpu --small    # tries the script where there is no GPU

Each step runs in a process of its own, forked from one that has imported torch and has not started CUDA. A process that
dies, or that is not done in its time and is killed, costs its own step only. After every step OUT/summary.md and
OUT/all.tgz are written anew: whatever ends a run leaves the figures before it. The state is in build/gpu, so that a
second run repeats what failed, goes on with what was unfinished, and then measures the layers of DeepBench.

Exit code: 0 where every step is done, 3 where something is left for another run, 1 where a step failed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import importlib
import json
import os
import signal
import sys
import tarfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from benchmarks.gpu.figures import Figures, read, summary

STEPS = {
    "card": 20.0,
    "engines": 35.0,
    "layers": 110.0,
    "networks": 75.0,
    "decoder": 90.0,
    "volumes": 40.0,
    "host": 30.0,
    "results": 90.0,
    "ranks": 40.0,
    "sanitizer": 20.0,
}
"""Every step, a module of benchmarks/gpu/steps, with the seconds after which it is killed."""

REST = {"deepbench": 200.0}
"""What takes the time that is left."""

FIRST_SECONDS, LATER_SECONDS = 550.0, 200.0

LEAST_SECONDS = 8.0
"""With less left no step is started."""

GRACE = 3.0
"""Seconds before it would be killed, at which a step begins nothing more."""

PR_SET_CHILD_SUBREAPER = 36
"""As in Linux' sys/prctl.h."""

DONE, UNFINISHED = "done", "unfinished"


@dataclass(frozen=True)
class Run:
    """What a step is given.

    Attributes:
        figures: where its figures go.
        device: to be measured.
        small: whether sizes are to be so small that a host does them in seconds.
        folder: for its files, kept for later runs.
        ends: the time of `time.monotonic` at which it is to begin nothing more.
    """

    figures: Figures
    device: torch.device
    small: bool
    folder: Path
    ends: float

    @property
    def left(self) -> float:
        """Seconds."""
        return self.ends - time.monotonic()

    def attempt(self, name: str, work: Callable[..., object], *given: object) -> None:
        """Does a piece of a step. A figure of that name tells why it fails, and the step goes on, if the GPU does."""
        try:
            work(*given)
        except Exception as error:
            traceback.print_exc()
            self.figures.add(name, f"failed: {(str(error).strip() or repr(error)).splitlines()[0]}")
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # raises where every other piece would fail, too


class Fifteen:
    """The steps with their states, on files.

    Args:
        state: the folder of the state.
        out: the folder of the page and the archive.
    """

    def __init__(self, state: Path, out: Path, device: str, small: bool) -> None:
        self._folder, self._out, self._device, self._small = state, out, device, small
        state.mkdir(parents=True, exist_ok=True)
        out.mkdir(parents=True, exist_ok=True)
        self._file = state / "state.json"
        self.states: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}

    def run(self, name: str, seconds: float) -> str:
        """Runs a step in a process of its own, and returns its state: done, unfinished, or what went wrong."""
        log = self._folder / f"{name}.txt"
        began = time.monotonic()
        self._keep(name, {"state": "started", "seconds": None})
        sys.stdout.flush()
        # A process whose parent dies becomes a child of this one, which ends all of a step.
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        process = os.fork()
        if process == 0:
            written = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(written, 1)
            os.dup2(written, 2)
            faulthandler.dump_traceback_later(seconds - GRACE / 3)  # the log says where a step was when it was killed
            os._exit(self._step(name, began + seconds - GRACE))
        code = _wait(process, began + seconds)
        took = time.monotonic() - began
        state = {None: f"killed after {took:.0f} s", 0: DONE, 3: UNFINISHED}.get(code, "")
        if not state:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            died = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
            state = f"failed: {died}: {lines[-1] if lines else 'no output'}"
        self._keep(name, {"state": state, "seconds": took})
        return state

    def _step(self, name: str, ends: float) -> int:
        try:
            step = importlib.import_module(f"benchmarks.gpu.steps.{name}")
            figures = Figures(self._folder / "figures.jsonl", name)
            device = torch.device(self._device)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            whole = step.measure(Run(figures, device, self._small, self._folder, ends))
            return 0 if whole else 3
        except BaseException:
            traceback.print_exc()
            return 1
        finally:
            sys.stdout.flush()
            sys.stderr.flush()

    def _keep(self, name: str, state: dict[str, Any]) -> None:
        """Writes the state, the page and the archive anew."""
        self.states[name] = state
        _replace(self._file, json.dumps(self.states, indent=1))
        page = summary(self.states, read(self._folder / "figures.jsonl"), f"fifteen.py on {self._device}")
        _replace(self._out / "summary.md", page)
        archive = self._out / "all.tgz.part"
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(self._folder, arcname="gpu")
        archive.rename(self._out / "all.tgz")


def _wait(process: int, until: float) -> int | None:
    """The exit code of a process, negative for a signal; None where it was killed because it took too long."""
    code = None
    while code is None and time.monotonic() < until:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    _end_children()
    return code


def _end_children() -> None:
    """Kills all that a step has started, in other sessions, too, but waits for none that the driver keeps."""
    until = time.monotonic() + GRACE
    while time.monotonic() < until and (found := [*_children()]):
        for child in found:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)


def _children() -> Iterator[int]:
    for about in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            if int(about.read_bytes().rpartition(b")")[2].split()[1]) == os.getpid():
                yield int(about.parent.name)


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".part")
    unfinished.write_text(text)
    unfinished.rename(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of summary.md and all.tgz")
    parser.add_argument("--seconds", type=float, help=f"of this run ({FIRST_SECONDS:g}, and {LATER_SECONDS:g} later)")
    parser.add_argument("--device", default="cuda:0", help="(default %(default)s)")
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script")
    parser.add_argument("--patience", type=float, default=1.0, help="multiplies all limits, on a slow machine")
    parser.add_argument("--state", type=Path, default=ROOT / "build/gpu", help="folder of the state (build/gpu)")
    usual = [*STEPS, *REST]
    parser.add_argument("--only", action="append", choices=usual, help="this step, done or not; repeatable")
    options = parser.parse_args()
    began = time.monotonic()
    # For the processes that steps start: the packages need not be installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    fifteen = Fifteen(options.state, options.out, options.device, options.small)
    total = options.seconds or options.patience * (LATER_SECONDS if fifteen.states else FIRST_SECONDS)
    limits = {name: options.patience * seconds for name, seconds in {**STEPS, **REST}.items()}
    wanted = options.only or [name for name in usual if fifteen.states.get(name, {}).get("state") != DONE]
    while wanted:
        for name in wanted:
            left = total - (time.monotonic() - began)
            if left < LEAST_SECONDS:
                break
            state = fifteen.run(name, min(limits[name], left))
            print(f"fifteen.py: {name}: {state} [{fifteen.states[name]['seconds']:.1f} s]", flush=True)
        left = total - (time.monotonic() - began)
        # The time that is left over goes to what was cut short.
        wanted = [name for name in wanted if left >= LEAST_SECONDS and fifteen.states[name]["state"] == UNFINISHED]
    states = {name: fifteen.states.get(name, {"state": "not begun"})["state"] for name in options.only or usual}
    failed = [name for name, state in states.items() if state.startswith(("failed", "killed"))]
    rest = [name for name, state in states.items() if state in (UNFINISHED, "not begun")]
    done = f"{sum(state == DONE for state in states.values())} of {len(states)} steps are done"
    print(f"fifteen.py: {done}; failed: {', '.join(failed) or 'none'}; left: {', '.join(rest) or 'none'}", flush=True)
    return 1 if failed else 3 if rest else 0


if __name__ == "__main__":
    raise SystemExit(main())
