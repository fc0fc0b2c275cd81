"""The algorithms of cuDNN's graph API, which it calls engines, as a provider."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.convolution.tile import divided_dims, extent, tile
from mucudnn.process import Recent, renewed
from mucudnn.providers.cudnn.allowed import Proposal, erratum, is_deterministic, is_tf32, offered, ranked, refusal
from mucudnn.providers.cudnn.backend import Behavior, Descriptor, HeuristicMode
from mucudnn.providers.cudnn.form import Form, form, is_too_large
from mucudnn.providers.cudnn.graph import Configuration, ExecutionPlan, OperationGraph, PlannedCard
from mucudnn.providers.cudnn.launch import CudnnProvider, Prepared
from mucudnn.providers.cudnn.library import CudnnError
from mucudnn.providers.cudnn.plans import Plans
from mucudnn.providers.provider import Archive

if TYPE_CHECKING:
    from mucudnn.providers.cudnn.card import Card

SIZES = (1, 16, 256)
"""Mini-batches for which the heuristic is asked: what it proposes for one may be what fits at another."""


def _ready(form: Form, plan: ExecutionPlan) -> Prepared:
    return Prepared(form, plan.workspace, plan.execute, form.problem.alignment)


MOST_KERNELS = 256  # The number of compiled engines whose kernels are kept for other mini-batches.

MOST_PROBLEMS = 4096  # The number of problems for which the offered algorithms are cached.


class Engines(CudnnProvider):
    """cuDNN's engines with settings of their knobs, each an algorithm: "eng17_k2=3".

    Offered are the best of those that cuDNN's heuristic A and its fallback list propose and that torch's settings
    allow; with `every`, all other engines, too, their knobs at the defaults. What is offered need not serve the problem
    after all: only a plan shows that, and none is made for the names.
    """

    def __init__(self, place: Card, every: bool = False) -> None:
        self.archive: Archive | None = None  # An archive of plans that were compiled, also by other processes.
        super().__init__(place)
        self._every = every
        self._lock = renewed(threading.RLock())
        self._plans = Plans(self._made)
        self._kernels: Recent[tuple[object, ...], Descriptor | None] = Recent(MOST_KERNELS)
        self._known: Recent[tuple[object, ...], tuple[dict[str, bool], dict[str, str]]] = Recent(MOST_PROBLEMS)

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        return tuple(self._chosen_for(problem)[0])

    def is_compiled(self, problem: ConvProblem, algorithm: str) -> bool:
        """Whether one of the algorithms is compiled at run time, so that a plan of it takes long to make."""
        return self._chosen_for(problem)[0].get(algorithm, False)

    @property
    def plans_made(self) -> int:
        """How many plans cuDNN was asked for so far."""
        return self._plans.made

    def refused(self, problem: ConvProblem) -> dict[str, str]:
        """Why configurations that cuDNN proposes are not offered now, or are but do not serve, which takes plans."""
        names, reasons = self._chosen_for(problem)
        return self._with_refusals(dict(reasons), problem, names)

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        put = _form(problem)
        sums = (False, True) if problem.target is Role.W and not problem.is_half else (False,)
        return put.copied_bytes + max(self._plans.workspace(problem, algorithm, accumulate) for accumulate in sums)

    def prepared(self, problem: ConvProblem, algorithm: str, accumulate: bool) -> Prepared:
        return self._plans.plan(problem, algorithm, accumulate)

    def _made(self, problem: ConvProblem, algorithm: str, accumulate: bool) -> Prepared:
        put = _form(problem)
        configuration = Configuration.parsed(algorithm)
        with self.place.planning() as device:
            graph = OperationGraph(self.place.library, device, put, accumulate)
            engine = graph.engine(configuration.engine)
            if Behavior.RUNTIME_COMPILATION not in engine.behavior:
                return _ready(put, graph.plan(engine, configuration.knobs))
            launch = f"{algorithm} extent={problem.extent} alignment={problem.alignment} accumulate={accumulate}"
            text = None if self.archive is None else self.archive.compiled_plan(problem, launch)
            if text is not None:
                with suppress(CudnnError):  # it is of a cuDNN that writes plans differently: a new one takes its place
                    return _ready(put, graph.restored(text))
            plan = self._compiled(device, put, configuration, accumulate)
            plan = plan or graph.plan(engine, configuration.knobs)
            if self.archive is not None:
                self.archive.keep_compiled_plan(problem, launch, plan.text)
            return _ready(put, plan)

    def _compiled(
        self, device: PlannedCard, put: Form, configuration: Configuration, accumulate: bool
    ) -> ExecutionPlan | None:
        """The plan of an engine that is compiled at run time, with the kernel of another mini-batch where there is one.

        None where this cuDNN, or the engine, compiles each shape for itself.
        """
        key = put.problem.with_extent(1), configuration, accumulate
        kernels = self._kernels.get(key)
        if key in self._kernels and kernels is None:
            return None
        try:
            graph = OperationGraph(self.place.library, device, put, accumulate, is_dynamic=True)
            kernels = kernels or graph.kernel_cache()
            plan = graph.plan(graph.engine(configuration.engine), configuration.knobs, kernels)
        except CudnnError:
            self._kernels[key] = None
            return None
        self._kernels[key] = kernels
        return plan

    def _chosen_for(self, problem: ConvProblem) -> tuple[dict[str, bool], dict[str, str]]:
        """Whether each algorithm that is offered is compiled, and of the others that were proposed, why not."""
        key = problem, is_tf32(), is_deterministic()
        with self._lock:
            if key not in self._known:
                self._known[key] = self._chosen(problem)
            return self._known[key]

    def _chosen(self, problem: ConvProblem) -> tuple[dict[str, bool], dict[str, str]]:
        problem = _asked_for(problem)
        put = form(problem)
        if put is None:
            return {}, {}
        with self.place.planning() as device:
            try:
                graph = OperationGraph(self.place.library, device, put, accumulate=False)
            except CudnnError as error:
                return {}, {"every engine": str(error)}
            lists = self._proposed(problem, device)
            found, reasons = offered(ranked([[self._proposal(problem, graph, one) for one in each] for each in lists]))
            if self._every:
                proposed = {configuration.engine for each in lists for configuration in each}
                rest = (Configuration(index) for index in range(graph.engines) if index not in proposed)
                others = [self._proposal(problem, graph, configuration) for configuration in rest]
                reasons |= {str(one.configuration): one.reason for one in others if one.reason is not None}
                found += [one for one in others if one.reason is None]
        return {str(one.configuration): one.compiled for one in found}, reasons

    def _proposal(self, problem: ConvProblem, graph: OperationGraph, configuration: Configuration) -> Proposal:
        """Whether a configuration may be offered now, as far as that is known without a plan of it."""
        try:
            engine = graph.engine(configuration.engine)
        except CudnnError as error:
            return Proposal(configuration, reason=str(error))
        reason = refusal(problem, engine.notes) or erratum(problem, configuration, self.place.library.version)
        return Proposal(configuration, Behavior.RUNTIME_COMPILATION in engine.behavior, reason)

    def _proposed(self, problem: ConvProblem, device: PlannedCard) -> list[list[Configuration]]:
        """A list for each of the sizes, the best first, the fallbacks last."""
        found: list[list[Configuration]] = []
        for size in SIZES:
            put = form(problem.with_extent(size))
            if put is None:
                continue
            try:
                sized = OperationGraph(self.place.library, device, put, accumulate=False)
            except CudnnError:
                continue  # too large for cuDNN, say
            modes = HeuristicMode.A, HeuristicMode.FALLBACK
            found.append([configuration for mode in modes for configuration in sized.proposed(mode)])
        return found


def _form(problem: ConvProblem) -> Form:
    """
    Raises:
        CudnnError: for a problem that cuDNN cannot be asked for, before it is asked for a plan.
    """
    put = form(problem)
    if put is None:
        raise CudnnError("form", 0, "it is too large, or cuDNN would compute another output shape")
    return put


def _asked_for(problem: ConvProblem) -> ConvProblem:
    """The problem, or, of one that is too large for cuDNN, a part in the middle that is not, if there is one."""
    for dim in divided_dims(problem):
        while is_too_large(problem) and (size := extent(problem, dim)) > 1:
            problem = tile(problem, dim, size // 4, size // 2).problem
    return problem
