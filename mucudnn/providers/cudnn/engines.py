"""Engines: the algorithms of cuDNN's graph API."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from dataclasses import dataclass

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.convolution.tile import Part
from mucudnn.providers.cudnn.allowed import erratum, is_deterministic, is_tf32, refusal
from mucudnn.providers.cudnn.backend import HeuristicMode
from mucudnn.providers.cudnn.form import MOST_ALIGNMENT, Form, form
from mucudnn.providers.cudnn.graph import Configuration, Graph
from mucudnn.providers.cudnn.launch import Place, copies, launch
from mucudnn.providers.cudnn.library import CudnnError

SIZES = (1, 16, 256)
"""Mini-batches for which the heuristic is asked: what it proposes for one may be what fits at another."""

FIRST = 4
"""The heuristic's first proposals, of whatever engines, that are offered beside the first of each further engine."""


@dataclass(frozen=True)
class _Ready:
    """A plan made for one problem."""

    form: Form
    alignment: int
    workspace: int
    execute: Callable[[c_void_p, int, int, int, int], None]


_Key = tuple[ConvProblem, str, bool, int]


class Engines:
    """cuDNN's engines with settings of their knobs, each an algorithm: "eng17_k2=3".

    Offered are those that cuDNN's heuristic A and its fallback list propose and that torch's settings allow; with
    `every`, also all other engines that serve the problem, their knobs at the defaults.
    """

    def __init__(self, place: Place, every: bool = False) -> None:
        self._place = place
        self._every = every
        self._lock = threading.RLock()
        self._ready: dict[_Key, _Ready | CudnnError] = {}
        self._offered: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._refused: dict[tuple[object, ...], dict[str, str]] = {}

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        key = self._key(problem)
        with self._lock:
            if key not in self._offered:
                self._offered[key], self._refused[key] = self._chosen(problem)
            return self._offered[key]

    def refused(self, problem: ConvProblem) -> dict[str, str]:
        """Why configurations that cuDNN proposes are not offered now."""
        self.algorithms(problem)
        return self._refused[self._key(problem)]

    def serves(self, problem: ConvProblem, algorithm: str) -> bool:
        try:
            self.workspace(problem, algorithm)
        except CudnnError:
            return False
        return True

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        sums = (False, True) if problem.target is Role.W and not problem.is_half else (False,)
        ready = [self.prepared(problem, algorithm, accumulate) for accumulate in sums]
        return max(one.workspace for one in ready) + copies(ready[0].form)

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        launch(self._place, self, algorithm, parts, accumulate)

    def prepared(self, problem: ConvProblem, algorithm: str, accumulate: bool, alignment: int = 0) -> _Ready:
        """
        Raises:
            CudnnError: where the engine does not serve the problem.
        """
        key = problem, algorithm, accumulate, alignment
        found = self._ready.get(key)
        if found is None:
            with self._lock:
                found = self._ready[key] = self._made(*key)
        if isinstance(found, CudnnError):
            raise found
        return found

    def _made(self, problem: ConvProblem, algorithm: str, accumulate: bool, alignment: int) -> _Ready | CudnnError:
        put = form(problem)
        if put is None:
            return CudnnError("form", 0, "cuDNN would compute another output shape")
        alignment = min(alignment or put.alignment, MOST_ALIGNMENT)
        configuration = Configuration.parsed(algorithm)
        try:
            with self._place.current():
                graph = Graph(self._place.library, self._place.device, put, alignment, accumulate)
                plan = graph.plan(graph.engine(configuration.engine), configuration.knobs)
        except CudnnError as error:
            return error
        return _Ready(put, alignment, plan.workspace, plan.execute)

    def _key(self, problem: ConvProblem) -> tuple[object, ...]:
        return problem, is_tf32(), is_deterministic()

    def _chosen(self, problem: ConvProblem) -> tuple[tuple[str, ...], dict[str, str]]:
        """The algorithms that are offered, and of the others that were proposed, why not."""
        put = form(problem)
        if put is None:
            return (), {}
        library, device = self._place.library, self._place.device
        offered: list[str] = []
        refused: dict[str, str] = {}
        with self._place.current():
            try:
                graph = Graph(library, device, put, put.alignment, accumulate=False)
            except CudnnError as error:
                return (), {"every engine": str(error)}
            for configuration in self._proposed(problem, graph):
                name = str(configuration)
                try:
                    engine = graph.engine(configuration.engine)
                    reason = refusal(problem, engine.notes) or erratum(problem, configuration, library.version)
                    if reason is None:
                        self.workspace(problem, name)
                        offered.append(name)
                        continue
                except CudnnError as error:
                    reason = str(error)
                refused[name] = reason
        return tuple(offered), refused

    def _proposed(self, problem: ConvProblem, graph: Graph) -> list[Configuration]:
        """Without repetition, in the order of their merit."""
        found: dict[Configuration, None] = {}
        for size in SIZES:
            put = form(problem.with_extent(size))
            assert put is not None, "the mini-batch has no part in it"
            try:
                sized = Graph(self._place.library, self._place.device, put, put.alignment, accumulate=False)
            except CudnnError:
                continue  # too large for cuDNN, say
            met: set[int] = set()
            for number, configuration in enumerate(sized.proposed(HeuristicMode.A)):
                if number < FIRST or configuration.engine not in met:
                    found[configuration] = None
                met.add(configuration.engine)
            found |= dict.fromkeys(sized.proposed(HeuristicMode.FALLBACK))
        if self._every:
            met = {configuration.engine for configuration in found}
            found |= {Configuration(index): None for index in range(graph.engines) if index not in met}
        return list(found)
