"""The memory of a script's other models, and of the graphs of its other calls, while one call is computed."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distconv.fitting.choice import Fit
from distconv.fitting.sharded_parameters import bytes_here
from distconv.fitting.workspaces import EVERY, Workspaces
from distconv.model.optimizer_steps import optimizers
from distconv.turns.asked_numbers import Answers

STATES = {"SGD": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 2, "Adagrad": 1, "Rprop": 2}
"""The most numbers that an optimizer will keep per element of a parameter, for optimizers that have not stepped yet."""


MOST_CHOICES = 2  # For one kind of call, whose memory besides may differ between training and validation.


class Others(NamedTuple):
    """The memory besides that of a call, in bytes.

    Attributes:
        kept: the bytes of other models' parameters and gradients, of the model's own gradients of earlier calls, and of
            the graphs of calls of other kinds.
        same: the number of graphs of calls of its own kind that are alive.
        later: the bytes that calls between its forward and its backward need, with the graphs that are alive then.
    """

    kept: int = 0
    same: int = 0
    later: int = 0


NONE = Others()


@dataclass(eq=False)
class Chosen:
    """How calls of one kind are computed.

    Attributes:
        fit: the chosen fit.
        limit: bytes that the call might take if nothing else were in memory.
        others: the other memory when the fit was chosen.
        own: bytes of the call's parameters, buffers, inputs and results.
        shared: those of them that count for other calls too: parameters, buffers, and inputs that other calls returned.
        repeated: the names of the buffers that the call changes, if it can be computed twice.
        workspaces: of its convolutions.
        guessed: the guesses of numbers that the call asked for when it was followed.
        answered: whether a computed call has had these numbers since.
        after: the calls that were made between its forward and its backward, each with the graphs of later calls that
            were alive then.
        past: the choices so far for other memory besides, of which one may suit again.
    """

    fit: Fit
    limit: float
    others: Others = NONE
    own: int = 0
    shared: int = 0
    repeated: tuple[str, ...] | None = None
    workspaces: Workspaces = EVERY
    guessed: Answers = field(default_factory=dict)
    answered: bool = False
    after: dict[tuple[int, ...], tuple[Sequence[Chosen], Chosen]] = field(default_factory=dict)
    past: list[Chosen] = field(default_factory=list)

    def choose(self, other: Chosen) -> None:
        """Takes over the choice of another object, in place of all choices so far."""
        self._take(other, [])

    def add(self, other: Chosen) -> None:
        """Takes over the choice of another object, beside those so far."""
        self._take(other, [*(self.past or [replace(self)]), other])

    def confirm(self) -> None:
        """The numbers that were guessed are as guessed, for all choices so far."""
        self.answered = False
        for each in (self, *self.past):
            each.guessed = {}

    def choose_again(self, others: Others) -> bool:
        """Takes over the best choice so far that suits; whether there is one."""
        if not self.past:
            return self.suits(others)
        suitable = [each for each in self.past if each.suits(others)]
        if suitable:
            best = min(suitable, key=lambda each: (not each.fit.fits, each.fit.slower))
            if best.fit is not self.fit:
                self._take(best, self.past)
        return bool(suitable)

    def least_others(self, others: Others) -> Others:
        """The other memory to choose for: after some choices the most of all, so that there comes an end to them."""
        if len(self.past) < MOST_CHOICES:
            return others
        return Others(*map(max, zip(others, *(each.others for each in self.past), strict=True)))

    def _take(self, other: Chosen, past: list[Chosen]) -> None:
        vars(self).update(vars(other), after=self.after, past=past, answered=False)
        self.workspaces.apply(self)

    def suits(self, others: Others) -> bool:
        """Whether the choice is still valid with this other memory: there is no more of it, or all fits the limit, or
        nothing has fitted beside less."""
        pairs = [*zip(others, self.others, strict=True)]
        if all(now <= before for now, before in pairs):
            return True
        if not self.fit.fits and all(now >= before for now, before in pairs):
            return True
        most = max(self.fit.alone, self.own + self.fit.kept + others.later) + others.same * self.fit.kept
        return not self.fit.peak or most + others.kept <= self.limit


class CallGraph:
    """Is alive as long as a call's graph: until its backward begins, or nothing can begin it any more. ``number``: in
    the order of the calls."""

    def __init__(self, chosen: Chosen, number: int) -> None:
        self.chosen, self.number = chosen, number


class Beside:
    """The models that have been called, and the graphs that are alive, in one process.

    Attributes:
        is_alone: whether one model alone has been called, each time after backward of its last call had begun. Unlike
            memory, which garbage may take for longer on one rank than on another, this is equal on all ranks.
    """

    def __init__(self) -> None:
        self.is_alone = True
        self._numbers = itertools.count()
        self._called = 0  # The number of models that have been called.
        self._awaited = 0  # The number of calls whose backward has not begun; that of some never will.
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._graphs: weakref.WeakSet[CallGraph] = weakref.WeakSet()
        self._trained: weakref.WeakKeyDictionary[nn.Module, tuple[Callable[[], Tensor | None], int]]
        self._trained = weakref.WeakKeyDictionary()  # By model: a trained parameter, and the bytes of all of them.
        self._weights: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()
        """By model: the number of models when it was last computed, and the bytes of the other models' parameters and
        gradients."""

    def others(self, module: nn.Module, chosen: Chosen | None) -> Others:
        """The other memory at a call of a module; ``chosen``: how the call is computed, if that is known."""
        self._called += module not in self._models
        self._models.add(module)
        self.is_alone &= self._called == 1 and not self._awaited
        if chosen is None and len(self._models) > 1:
            gc.collect()  # Models that are garbage do not count.
        graphs = [graph.chosen for graph in self._graphs]
        kept = self._of_models(module) + self._own_gradients(module)
        kept += sum(each.fit.kept for each in graphs if each is not chosen)
        if chosen is None:
            return Others(kept)
        later = (
            sum(each.fit.kept for each in more if each is not chosen) + call.fit.alone - call.shared
            for more, call in chosen.after.values()
            if call is not chosen
        )
        return Others(kept, sum(each is chosen for each in graphs), max(later, default=0))

    def note(self, chosen: Chosen, result: Any) -> None:
        """Called when a call has returned its result."""
        if chosen.fit.peak:
            alive = list(self._graphs)
            for graph in alive:
                # Those that were alive at the graph's own call counted there already.
                more = [each.chosen for each in alive if each.number > graph.number]
                key = (*sorted(map(id, more)), id(chosen))
                graph.chosen.after[key] = more, chosen
        nodes = {x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None}
        if nodes and chosen.fit.kept > 0:
            graph = CallGraph(chosen, next(self._numbers))
            self._graphs.add(graph)
            self._awaited += 1

            def begin(*_: Any) -> None:
                self._awaited -= graph in self._graphs
                self._graphs.discard(graph)

            for node in nodes:
                node.register_hook(begin)  # which keeps the graph alive with the node

    def _of_models(self, module: nn.Module) -> int:
        count, found = self._weights.get(module, (0, 0))
        if count != len(self._models):
            own = {id(p) for p in module.parameters()}
            others = {id(p): p for each in self._models for p in each.parameters() if id(p) not in own}
            found = sum((1 + p.requires_grad) * bytes_here([p]) for p in others.values())
            self._weights[module] = len(self._models), found
        return found

    def _own_gradients(self, module: nn.Module) -> int:
        """The bytes of a model's gradients, if it has some: a program that adds them up over calls has them all."""
        first, size = self._trained.get(module, (lambda: None, 0))
        one = first()
        if one is None or not one.requires_grad:
            trained = [p for p in module.parameters() if p.requires_grad]
            if not trained:
                return 0
            one, size = trained[0], bytes_here(trained)
            self._trained[module] = weakref.ref(one), size
        return 0 if one.grad is None else size

    def models(self) -> Iterable[nn.Module]:
        """The models that have been called and are alive."""
        return list(self._models)


def optimizer_bytes(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Bytes that optimizers keep for the parameters of modules, and bytes that they will add at their first step."""
    own = {id(p) for module in modules for p in module.parameters()}
    there = missing = 0
    for each in optimizers():
        for p in (p for group in each.param_groups for p in group["params"] if id(p) in own):
            if p in each.state:
                there += bytes_here(x for x in each.state[p].values() if isinstance(x, Tensor))
            elif p.requires_grad:
                missing += _numbers(each) * bytes_here([p])
    return there, missing


def _numbers(optimizer: torch.optim.Optimizer) -> int:
    kind = next((name for name in (c.__name__ for c in type(optimizer).__mro__) if name in STATES), "Adam")
    if kind == "SGD":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    return STATES[kind] + int(any(group.get("amsgrad") for group in optimizer.param_groups))
