"""A call of a model some segments of which give up what they keep for backward."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distconv.fitting.again import computed_again
from distconv.fitting.away import Away
from distconv.fitting.ways import AGAIN, AWAY, Way
from distconv.turns.methods import forward_replaced


def call_retaining(
    call: Callable[..., Any], model: nn.Module, *args: Any, ways: Sequence[Way], device: str, **kwargs: Any
) -> Any:
    """The result of a model's call. Gradients are those of a call that keeps all.

    Args:
        call: calls the model.
        ways: what some of its segments give up; none of these within another one.
        device: the kind of device of the storages that leave.
    """
    away = None
    with contextlib.ExitStack() as around:
        if any(way.how == AWAY for way in ways):
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            away = Away(device, (*model.parameters(), *model.buffers(), *inputs))
            around.enter_context(away.call())
        of_module = defaultdict(list)
        for way in ways:
            of_module[way.segment.module].append(way)
        for name, own in of_module.items():
            around.enter_context(_Calls(model, model.get_submodule(name), own, away).instead())
        return call(model, *args, **kwargs)


class _Calls:
    """The calls of one module within that of the model."""

    def __init__(self, model: nn.Module, module: nn.Module, ways: Sequence[Way], away: Away | None) -> None:
        self._module, self._away, self._number = module, away, -1
        self._ways = defaultdict(list)
        for way in ways:
            self._ways[way.segment.call].append(way)
        self._changed = {way: [model.get_buffer(name) for name in way.buffers] for way in ways}
        self._forward = module.forward

    def instead(self) -> contextlib.AbstractContextManager[None]:
        """A context in which the module's forward is this one's."""
        return forward_replaced(self._module, self._run)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self._number += 1
        ways = self._ways.get(self._number)
        if not ways:
            return self._forward(*args, **kwargs)
        if ways[0].segment.children is None:
            return self._segment(ways[0], self._forward, [self._module], args, kwargs)
        return self._row(sorted(ways, key=lambda way: way.segment.children or ()), *args)

    def _row(self, ways: Sequence[Way], x: Any) -> Any:
        """The result of an `nn.Sequential`."""
        children, at = list(self._module.children()), 0
        for way in ways:
            assert way.segment.children is not None
            first, end = way.segment.children
            x = _in_a_row(children[at:first], x)
            x = self._segment(way, functools.partial(_in_a_row, children[first:end]), children[first:end], (x,), {})
            at = end
        return _in_a_row(children[at:], x)

    def _segment(
        self, way: Way, function: Callable[..., Any], modules: Sequence[nn.Module], args: Any, kwargs: Any
    ) -> Any:
        if way.how == AGAIN:
            return computed_again(function, modules, self._changed[way], args, kwargs)
        assert self._away is not None
        with self._away.segment() as stays:
            result = function(*args, **kwargs)
            stays += [x for x in tree_leaves(result) if isinstance(x, Tensor) and not way.results]
        return result


def _in_a_row(children: Sequence[nn.Module], x: Any) -> Any:
    for child in children:
        x = child(x)
    return x
