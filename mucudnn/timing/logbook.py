"""The times that are known under one environment, kept in the database."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from mucudnn.convolution.problem import ConvProblem
from mucudnn.devices import Device, device_of
from mucudnn.optimizer import Option
from mucudnn.process import warn
from mucudnn.timing.database import Launches
from mucudnn.timing.store import Store, canonical
from mucudnn.version import VERSION


@dataclass(frozen=True)
class Environment:
    """The machine, the libraries and the switches under which a launch is timed."""

    device: str  # The device's type and name.
    threads: int  # Intra-operator threads of the host; 0 where they have no part in it.
    deterministic: bool  # Whether only deterministic algorithms may run.
    precision: str  # The switches that let a backend compute in a narrower type, as text.
    libraries: str  # Versions of what runs the launches, as text.

    @classmethod
    def current(cls, device: torch.device) -> Environment:
        """The environment of a call on `device` now."""
        found = device_of(device)
        libraries = [f"mucudnn {VERSION}", f"torch {torch.__version__}", found.libraries]
        return cls(
            device=found.name,
            threads=found.threads,
            deterministic=found.is_deterministic,
            precision=found.precision,
            libraries=", ".join(filter(None, libraries)),
        )

    def launch_key(self) -> dict[str, Any]:
        """Plain values for a database."""
        return asdict(self)


WRONG, RIGHT = {"wrong": True}, {"right": True}
"""The terms under which a database keeps the algorithms whose results were wrong, with the faults, and those whose
results were those of another algorithm, with the dims along which they computed parts."""


class Logbook:
    """Looks up and keeps the times of one environment."""

    def __init__(self, environment: Environment, store: Store) -> None:
        """``store``: the database that keeps the times."""
        self.environment = environment  # Under which the times were, or are, measured.
        self._store = store

    def key(self, problem: ConvProblem) -> dict[str, Any]:
        """All on which the times of a problem's launches depend, but its number of samples, as plain values."""
        return {**problem.launch_key(), **self.environment.launch_key()}

    def launches(self, problem: ConvProblem) -> Launches:
        """The known launches of a problem, for any number of samples, by algorithm and extent."""
        return self._store.launches(self.key(problem))

    def record(self, problem: ConvProblem, option: Option) -> None:
        """Keeps a launch."""
        self._store.record(self.key(problem), [option])

    def record_later(self, problem: ConvProblem, option: Option) -> None:
        """Keeps a launch, in no call's way: within about a second."""
        self._store.record_later(self.key(problem), [option])

    def needs(self, problem: ConvProblem) -> Mapping[str, int | None]:
        """The workspaces of launches that were tried, by name; `None` of those that are not served."""
        return self._store.kept("needs", self.key(problem))

    def record_need(self, problem: ConvProblem, launch: str, workspace: int | None) -> None:
        """Keeps the workspace of a launch."""
        self._store.keep("needs", self.key(problem), launch, workspace)

    def note_wrong(self, problem: ConvProblem, faults: Mapping[str, str]) -> None:
        """Keeps the algorithms whose results were wrong, with what was wrong, and warns of each once."""
        known = self.wrong(problem)
        new = {algorithm: fault for algorithm, fault in faults.items() if algorithm not in known}
        for algorithm, fault in new.items():
            warn(f"{problem.direction} of {problem}: {algorithm} computed {fault}")
        if new:
            self.settle(problem, WRONG, {**new, **known})

    def wrong(self, problem: ConvProblem) -> dict[str, str]:
        """The algorithms whose results were wrong for a problem, for any number of samples, and what was wrong."""
        return self.settlement(problem, WRONG) or {}

    def note_right(self, problem: ConvProblem, used: Iterable[tuple[str, str]]) -> None:
        """Keeps that results were compared and right, by dim of the parts and algorithm."""
        known = self.right(problem)
        if not known.issuperset(used):
            self.settle(problem, RIGHT, sorted(known.union(used)))

    def right(self, problem: ConvProblem) -> set[tuple[str, str]]:
        """The algorithms that `note_right` has kept for a problem, for any number of samples."""
        return {(dim, algorithm) for dim, algorithm in self.settlement(problem, RIGHT) or ()}

    def settlement(self, problem: ConvProblem, terms: Mapping[str, Any]) -> Any:
        """The result that was found for a problem under these terms, in plain values; `None` if there is none."""
        text = self._store.kept("settlements", self.key(problem)).get(canonical(terms))
        return None if text is None else json.loads(text)

    def settle(self, problem: ConvProblem, terms: Mapping[str, Any], values: Any) -> None:
        """Keeps what was found, as plain values."""
        self._store.keep("settlements", self.key(problem), canonical(terms), json.dumps(values))


def settlements(store: Store) -> list[tuple[dict[str, Any], dict[str, Any], Any]]:
    """The results of planning for all problems: key, terms and values."""
    every = ((key, terms, text) for key, kept in store.everything("settlements") for terms, text in kept.items())
    return [(key, json.loads(terms), json.loads(text)) for key, terms, text in every]


class CompiledPlans:
    """The plans that cuDNN compiled at run time, of one kind of device under one version of cuDNN, by problem and
    launch: a later run restores them."""

    def __init__(self, store: Store, device: Device) -> None:
        self._store, self._device = store, device

    def compiled_plan(self, problem: ConvProblem, launch: str) -> str | None:
        return self._store.kept("compiled", self._key(problem)).get(launch)

    def keep_compiled_plan(self, problem: ConvProblem, launch: str, text: str) -> None:
        self._store.keep("compiled", self._key(problem), launch, text)

    def _key(self, problem: ConvProblem) -> dict[str, Any]:
        return {**problem.launch_key(), "device": self._device.name, "libraries": self._device.libraries}
