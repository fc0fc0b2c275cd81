"""A call of a model some segments of which give up what they keep for backward."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from distconv.fitting.away import Away
from distconv.fitting.ways import AGAIN, AWAY, Way
from distconv.rules.normalization.running import of_modules
from distconv.turns.methods import forward_replaced
from distconv.turns.turning import not_in_turn


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


UNFORESEEN = (
    "distconv: --memory: a call of {module} has changed {name}, which it did not when its model was followed: it cannot"
    " be computed again in backward; accepted: more memory, or --parts"
)

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {what} of a call"
    " that --memory computes again in backward"
)


def computed_again(
    function: Callable[..., Any], modules: Sequence[nn.Module], changed: Sequence[Tensor], args: Any, kwargs: Any
) -> Any:
    """The function's result; what it keeps for backward is computed again there.

    Random numbers and autocast are as in forward. Buffers change once.

    Args:
        function: calls the ``modules``.
        changed: the buffers that it changes. When it is computed again, it changes copies of what they were.
    Raises:
        RuntimeError: where it changes other buffers or parameters; in backward, where an input or a parameter has been
            changed in place since.
    """
    places = [
        (each, name, buffer, buffer.detach().clone())
        for module in modules
        for each in module.modules()
        for name, buffer in each._buffers.items()
        if buffer is not None and any(buffer is x for x in changed)
    ]
    leaves, form = tree_flatten((args, kwargs))
    inputs = [x for x in leaves if isinstance(x, Tensor) and not x.is_inference()]
    read = [(x, x._version, "an input") for x in inputs]
    read += [(p, p._version, "a parameter") for module in modules for p in module.parameters()]
    is_first = True

    def run(*leaves: Any) -> Any:
        nonlocal is_first
        args, kwargs = tree_unflatten(leaves, form)
        if is_first:
            is_first = False
            with _foreseen(modules, changed):
                return function(*args, **kwargs)
        for x, version, what in read:
            if x._version != version:
                raise RuntimeError(CHANGED.format(what=what))
        with _other_buffers(places), not_in_turn():
            return function(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False)


@contextlib.contextmanager
def _foreseen(modules: Sequence[nn.Module], changed: Sequence[Tensor]) -> Iterator[None]:
    """RuntimeError where other parameters or buffers are changed than those."""
    known = {id(x) for x in changed}
    state = [
        (module, name, x, x._version)
        for module in modules
        for name, x in (*module.named_parameters(), *module.named_buffers())
        if id(x) not in known
    ]
    yield
    for module, name, x, version in state:
        if x._version != version:
            raise RuntimeError(UNFORESEEN.format(module=type(module).__name__, name=name))


@contextlib.contextmanager
def _other_buffers(places: Sequence[tuple[nn.Module, str, Tensor, Tensor]]) -> Iterator[None]:
    # A model that runs on ranks, or in parts, has other dicts in backward than in forward.
    own = [(module._buffers, name, module._buffers.get(name)) for module, name, *_ in places]
    copies = [before.clone() for *_, before in places]
    for (buffers, name, _), copied in zip(own, copies, strict=True):
        buffers[name] = copied
    try:
        with of_modules(copies):
            yield
    finally:
        for buffers, name, buffer in own:
            buffers[name] = buffer
