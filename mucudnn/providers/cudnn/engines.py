"""Engines: the algorithms of cuDNN's graph API."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.convolution.tile import Part
from mucudnn.providers.cudnn.allowed import erratum, is_deterministic, is_tf32, refusal
from mucudnn.providers.cudnn.backend import HeuristicMode
from mucudnn.providers.cudnn.device import Device
from mucudnn.providers.cudnn.form import Form, form
from mucudnn.providers.cudnn.graph import Configuration, ExecutionPlan, Graph
from mucudnn.providers.cudnn.launch import Place, launch
from mucudnn.providers.cudnn.library import CudnnError
from mucudnn.providers.cudnn.plans import Plans
from mucudnn.recent import Recent

SIZES = (1, 16, 256)
"""Mini-batches for which the heuristic is asked: what it proposes for one may be what fits at another."""

FIRST = 4
"""The heuristic's first proposals, of whatever engines, that are offered beside the first of each further engine."""


class _Ready:
    """A plan made for one problem."""

    def __init__(self, form: Form, plan: ExecutionPlan) -> None:
        self.form = form
        self.alignment = form.problem.alignment
        self.workspace = plan.workspace
        self.execute = plan.execute


MOST_PROBLEMS = 4096
"""Of so many problems it is remembered what is offered."""


class Engines:
    """cuDNN's engines with settings of their knobs, each an algorithm: "eng17_k2=3".

    Offered are those that cuDNN's heuristic A and its fallback list propose and that torch's settings allow; with
    `every`, also all other engines that serve the problem, their knobs at the defaults.
    """

    def __init__(self, place: Place, every: bool = False) -> None:
        self._place = place
        self._every = every
        self._lock = threading.RLock()
        self._plans: Plans[_Ready] = Plans(self._made)
        self._known: Recent[tuple[object, ...], tuple[tuple[str, ...], dict[str, str]]] = Recent(MOST_PROBLEMS)

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        key = self._key(problem)
        with self._lock:
            return self._chosen_for(key, problem)[0]

    def refused(self, problem: ConvProblem) -> dict[str, str]:
        """Why configurations that cuDNN proposes are not offered now."""
        with self._lock:
            return self._chosen_for(self._key(problem), problem)[1]

    def serves(self, problem: ConvProblem, algorithm: str) -> bool:
        try:
            self.workspace(problem, algorithm)
        except CudnnError:
            return False
        return True

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        sums = (False, True) if problem.target is Role.W and not problem.is_half else (False,)
        own = max(self._plans.workspace(problem, algorithm, accumulate) for accumulate in sums)
        put = form(problem)
        assert put is not None, "there is a plan of it"
        return own + put.copied_bytes

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        launch(self._place, self, algorithm, parts, accumulate)

    def prepared(self, problem: ConvProblem, algorithm: str, accumulate: bool) -> _Ready:
        """
        Raises:
            CudnnError: where the engine does not serve the problem.
        """
        return self._plans.plan(problem, algorithm, accumulate)

    def _made(self, problem: ConvProblem, algorithm: str, accumulate: bool) -> _Ready:
        put = form(problem)
        if put is None:
            raise CudnnError("form", 0, "cuDNN would compute another output shape")
        configuration = Configuration.parsed(algorithm)
        with self._place.planning() as device:
            graph = Graph(self._place.library, device, put, accumulate)
            return _Ready(put, graph.plan(graph.engine(configuration.engine), configuration.knobs))

    def _key(self, problem: ConvProblem) -> tuple[object, ...]:
        return problem, is_tf32(), is_deterministic()

    def _chosen_for(self, key: tuple[object, ...], problem: ConvProblem) -> tuple[tuple[str, ...], dict[str, str]]:
        if key not in self._known:
            self._known[key] = self._chosen(problem)
        return self._known[key]

    def _chosen(self, problem: ConvProblem) -> tuple[tuple[str, ...], dict[str, str]]:
        """The algorithms that are offered, and of the others that were proposed, why not."""
        put = form(problem)
        if put is None:
            return (), {}
        considered: dict[str, str | None] = {}
        with self._place.planning() as device:
            try:
                graph = Graph(self._place.library, device, put, accumulate=False)
            except CudnnError as error:
                return (), {"every engine": str(error)}
            for configuration in self._proposed(problem, graph, device):
                considered[str(configuration)] = self._reason(problem, graph, configuration)
        for name, reason in considered.items():
            if reason is None:
                try:
                    self.workspace(problem, name)
                except CudnnError as error:
                    considered[name] = str(error)
        refused = {name: reason for name, reason in considered.items() if reason is not None}
        return tuple(name for name in considered if name not in refused), refused

    def _reason(self, problem: ConvProblem, graph: Graph, configuration: Configuration) -> str | None:
        """Why a configuration is not to be offered now, as far as that is known without a plan of it."""
        try:
            engine = graph.engine(configuration.engine)
        except CudnnError as error:
            return str(error)
        return refusal(problem, engine.notes) or erratum(problem, configuration, self._place.library.version)

    def _proposed(self, problem: ConvProblem, graph: Graph, device: Device) -> list[Configuration]:
        """Without repetition, in the order of their merit."""
        found: dict[Configuration, None] = {}
        for size in SIZES:
            put = form(problem.with_extent(size))
            assert put is not None, "the mini-batch has no part in it"
            try:
                sized = Graph(self._place.library, device, put, accumulate=False)
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
