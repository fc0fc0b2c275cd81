"""What other models of a script, and the graphs of its other calls, keep in memory while one call is computed."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distconv.fitting.choice import Fit

STATES = {"SGD": 1, "Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 2, "Adagrad": 1, "Rprop": 2}
"""Numbers that an optimizer keeps for each of a parameter, at the most, before it has begun to."""


class Others(NamedTuple):
    """What is in memory beside a call, in bytes.

    Attributes:
        kept: of other models' parameters and gradients, and what graphs of calls of other kinds keep.
        same: how many graphs of calls of its own kind are alive.
        later: what calls between its forward and its backward need, with what further graphs keep then.
    """

    kept: int = 0
    same: int = 0
    later: int = 0


NONE = Others()


@dataclass(eq=False)
class Chosen:
    """How calls of one kind are computed.

    Attributes:
        fit: the way.
        limit: bytes that the call might take if nothing were beside it.
        others: what was beside it when it was chosen.
        own: bytes of the call's parameters, buffers, inputs and results.
        shared: of these, what is counted elsewhere, too: parameters, buffers, and inputs that other calls have given.
        after: the calls that were made between its forward and its backward, each with other graphs alive then.
    """

    fit: Fit
    limit: float
    others: Others = NONE
    own: int = 0
    shared: int = 0
    after: dict[tuple[int, ...], tuple[Sequence[Chosen], Chosen]] = field(default_factory=dict)

    def choose(self, other: Chosen) -> None:
        """Calls are computed as another one says from now on."""
        self.fit, self.limit, self.others, self.own = other.fit, other.limit, other.others, other.own

    def suits(self, others: Others) -> bool:
        """Whether the call keeps within its limit, or within as much as when it was chosen, beside others."""
        if all(now <= before for now, before in zip(others, self.others, strict=True)):
            return True
        most = max(self.fit.peak, self.own + self.fit.kept + others.later) + others.same * self.fit.kept
        return not self.fit.peak or most + others.kept <= self.limit


class Graph:
    """What a call keeps for its backward, until that begins or nothing can begin it any more."""

    def __init__(self, chosen: Chosen) -> None:
        self.chosen = chosen


class Beside:
    """The models that have been called, and the graphs that are alive, in one process."""

    def __init__(self) -> None:
        self._models: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self._weights: weakref.WeakKeyDictionary[nn.Module, tuple[int, int]] = weakref.WeakKeyDictionary()
        """By model: how many there were, and the bytes of the others' parameters and gradients."""

    def others(self, module: nn.Module, chosen: Chosen | None) -> Others:
        """What is beside a call of a module now; ``chosen``: how it is computed, if that is known."""
        self._models.add(module)
        if chosen is None and len(self._models) > 1:
            gc.collect()  # Models that are garbage do not count.
        graphs = [graph.chosen for graph in self._graphs]
        kept = self._of_models(module) + sum(each.fit.kept for each in graphs if each is not chosen)
        if chosen is None:
            return Others(kept)
        later = (
            sum(each.fit.kept for each in more if each is not chosen) + call.fit.peak - call.shared
            for more, call in chosen.after.values()
            if call is not chosen
        )
        return Others(kept, sum(each is chosen for each in graphs), max(later, default=0))

    def note(self, chosen: Chosen, result: Any) -> None:
        """A call has given its result."""
        if chosen.fit.peak:
            alive = list(self._graphs)
            for graph in alive:
                more = [each.chosen for each in alive if each is not graph]
                key = (*sorted(map(id, more)), id(chosen))
                graph.chosen.after[key] = more, chosen
        nodes = {x.grad_fn for x in tree_leaves(result) if isinstance(x, Tensor) and x.grad_fn is not None}
        if nodes and chosen.fit.kept > 0:
            graph = Graph(chosen)
            self._graphs.add(graph)
            for node in nodes:
                node.register_hook(lambda *_: self._graphs.discard(graph))  # which keeps the graph as long as the node

    def _of_models(self, module: nn.Module) -> int:
        count, found = self._weights.get(module, (0, 0))
        if count != len(self._models):
            own = {id(p) for p in module.parameters()}
            others = {id(p): p for each in self._models for p in each.parameters() if id(p) not in own}
            found = sum((1 + p.requires_grad) * p.numel() * p.element_size() for p in others.values())
            self._weights[module] = len(self._models), found
        return found

    def models(self) -> Iterable[nn.Module]:
        """The models that have been called and are alive."""
        return list(self._models)


def optimizer_bytes(modules: Iterable[nn.Module]) -> tuple[int, int]:
    """Bytes that optimizers keep for modules' parameters, and bytes that they will keep, but do not yet."""
    own = {id(p) for module in modules for p in module.parameters()}
    there = missing = 0
    kinds = {torch.optim.Optimizer}
    while more := {kind for each in kinds for kind in each.__subclasses__()} - kinds:
        kinds |= more
    for each in [x for x in gc.get_objects() if type(x) in kinds]:  # to ask for a __class__ may run code
        for p in (p for group in each.param_groups for p in group["params"] if id(p) in own):
            if p in each.state:
                there += sum(x.numel() * x.element_size() for x in each.state[p].values() if isinstance(x, Tensor))
            elif p.requires_grad:
                missing += _numbers(each) * p.numel() * p.element_size()
    return there, missing


def _numbers(optimizer: torch.optim.Optimizer) -> int:
    kind = next((name for name in (c.__name__ for c in type(optimizer).__mro__) if name in STATES), "Adam")
    if kind == "SGD":
        return int(any(group.get("momentum") for group in optimizer.param_groups))
    return STATES[kind] + int(any(group.get("amsgrad") for group in optimizer.param_groups))
