"""The libraries, each in processes of its own, and what becomes of a case that one is given."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.conformance.cases import Case, parts
from benchmarks.conformance.judge import Numbers, judge, read
from benchmarks.process import Failed, Process

HERE = Path(__file__).resolve().parent
ANSWER_SECONDS = 600.0
"""After so long JAX hangs; torch's ranks have been ended before by the process that has started them."""

Outcome = tuple[str, str]
"""(right, wrong, refused, crash or hang; what the library said, or what is wrong)."""

BEST_FIRST = ("right", "refused", "crash", "hang", "wrong")


@dataclass(frozen=True)
class Library:
    """How a library is started: on so many ranks, by a python that has its package; LBANN's from a checkout of it."""

    title: str
    package: str
    start: Callable[[str, int], Process]


def _on_ranks(arm: str) -> Callable[[str, int], Process]:
    command = [str(HERE / "torch_peer.py"), arm]
    return lambda python, ranks: Process(f"{arm} on {ranks} ranks", [[python, *command, str(ranks)]])


def _on_lbann(checkout: str, ranks: int) -> Process:
    command = [sys.executable, str(HERE / "torch_peer.py"), "lbann", str(ranks)]
    return Process(f"LBANN's DistConv on {ranks} ranks", [command], LBANN_DISTCONV=checkout)


def _on_devices(python: str, devices: int) -> Process:
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    command = [python, str(HERE / "jax_peer.py")]
    return Process(f"JAX on {devices} devices", [command], XLA_FLAGS=flags, JAX_PLATFORMS="cpu")


LIBRARIES = {
    "distconv": Library("distconv", "distconv", _on_ranks("distconv")),
    "dtensor": Library("torch's DTensor", "torch", _on_ranks("dtensor")),
    "jax": Library("JAX, jit", "jax", _on_devices),
    "shardtensor": Library("PhysicsNeMo's ShardTensor", "physicsnemo.domain_parallel", _on_ranks("shardtensor")),
    "lbann": Library("LBANN's DistConv", "distconv", _on_lbann),
}


def missing(name: str, where: str) -> str | None:
    """Why a library cannot be asked, in one line."""
    package = LIBRARIES[name].package
    if name == "lbann":
        found = Path(where, package, "__init__.py").is_file()
        return None if found else "lbann is left out: --lbann names no checkout of LBANN/DistConv"
    try:
        tried = subprocess.run(
            [where, "-c", f"import {package}"], cwd=HERE.parents[1], capture_output=True, check=False
        )
    except OSError as error:
        return f"{name}: {where}: {error.strerror}"
    return None if tried.returncode == 0 else f"{name} is left out: no {package} in {Path(where).name}"


@dataclass
class Peer:
    """A library that is asked; its processes start at the first case for so many ranks, and anew after an end."""

    name: str
    where: str = sys.executable
    versions: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._processes: dict[int, Process] = {}
        self._ways: list[str] = []

    def outcome(self, case: Case, directory: Path, expected: Numbers) -> Outcome:
        """What becomes of a case, whose numbers lie in ``directory``: the best of the library's ways."""
        found: list[Outcome] = []
        for way in self._ways_of(case):
            found.append(self._attempt(case, directory, expected, way))
            if found[-1][0] == "right":
                break
        return min(found, key=lambda outcome: BEST_FIRST.index(outcome[0]))

    def _ways_of(self, case: Case) -> list[str]:
        if not self._ways:
            told = self._process(case.ranks).ask(do="tell")
            self.versions, self._ways = told["versions"], told["ways"]
        return [way for way in self._ways if not way or way in parts(case.partition)]

    def _attempt(self, case: Case, directory: Path, expected: Numbers, way: str) -> Outcome:
        for old in directory.glob("found-*.npz"):
            old.unlink()
        files = {"given": "given.npz", "expected": "expected.npz", "found": "found"}
        request: dict[str, Any] = {name: str(directory / file) for name, file in files.items()}
        request |= {"layer": asdict(case.layer), "partition": case.partition, "way": way}
        try:
            kind, said = self._process(case.ranks).ask(within=ANSWER_SECONDS, **request)
        except Failed as failure:
            self._processes.pop(case.ranks).kill()
            return "hang" if "no answer" in str(failure) else "crash", str(failure)
        if kind != "done":
            return kind, said
        return judge([read(path) for path in sorted(directory.glob("found-*.npz"))], expected)

    def _process(self, ranks: int) -> Process:
        if ranks not in self._processes:
            self._processes[ranks] = LIBRARIES[self.name].start(self.where, ranks)
        return self._processes[ranks]

    def close(self) -> None:
        for process in self._processes.values():
            process.close()
        self._processes = {}
