"""Calls a model with some of its segments computed again in backward, or with what they save moved off the device."""

from __future__ import annotations

import contextlib
import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from distconv.fitting.again import Again
from distconv.fitting.choice import Fit
from distconv.fitting.moving import MovedTensors
from distconv.fitting.state_changes import StateChanges
from distconv.fitting.ways import AGAIN, AWAY, SegmentWay
from distconv.turns.computation import Computation
from distconv.turns.methods import forward_replaced


def call_retaining(
    call: Callable[..., Any], model: nn.Module, *args: Any, ways: Sequence[SegmentWay], device: str, **kwargs: Any
) -> Any:
    """The result of a model's call. Gradients are those of a call that keeps all.

    Args:
        call: calls the model.
        ways: how some of its segments give up memory; no segment is within another one.
        device: the kind of device of the storages that are moved.
    """
    moved = None
    with contextlib.ExitStack() as around:
        if any(way.kind == AWAY for way in ways):
            inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            moved = MovedTensors(device, (*model.parameters(), *model.buffers(), *inputs))
            around.enter_context(moved.call())
        of_module = defaultdict(list)
        for way in ways:
            of_module[way.segment.module].append(way)
        for name, of_one in of_module.items():
            module = model.get_submodule(name)
            around.enter_context(forward_replaced(module, _ModuleCalls(model, module, of_one, moved).run))
        return call(model, *args, **kwargs)


def caller_retaining(ways: Sequence[SegmentWay], device: str) -> Callable[..., Any]:
    """A function that calls a module with its arguments, some segments giving up memory, as of `call_retaining`."""
    call = nn.Module.__call__
    return functools.partial(call_retaining, call, ways=ways, device=device) if ways else call


def computation_of(found: Fit, device: str) -> Computation:
    """How a call is computed as ``found`` says."""
    return Computation(found.partition, found.memory, call=caller_retaining(found.ways, device) if found.ways else None)


class _ModuleCalls:
    """The calls of one module within that of the model: its segments are computed as their ways say."""

    def __init__(
        self, model: nn.Module, module: nn.Module, ways: Sequence[SegmentWay], moved: MovedTensors | None
    ) -> None:
        self._module, self._moved, self._call = module, moved, -1
        self._ways = defaultdict(list)
        for way in ways:
            self._ways[way.segment.call].append(way)
        self._changed = {way: [model.get_buffer(name) for name in way.buffers] for way in ways}
        self._forward = module.forward

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Takes the place of the module's forward."""
        self._call += 1
        ways = self._ways.get(self._call)
        if not ways:
            return self._forward(*args, **kwargs)
        if ways[0].segment.children is None:
            return self._segment(ways[0], self._forward, [self._module], args, kwargs)
        return self._sequential(sorted(ways, key=lambda way: way.segment.children or ()), *args)

    def _sequential(self, ways: Sequence[SegmentWay], x: Any) -> Any:
        """The result of an `nn.Sequential` some of whose neighbouring children are segments."""
        children, at = list(self._module.children()), 0
        for way in ways:
            assert way.segment.children is not None
            first, end = way.segment.children
            x = _composed(children[at:first], x)
            x = self._segment(way, functools.partial(_composed, children[first:end]), children[first:end], (x,), {})
            at = end
        return _composed(children[at:], x)

    def _segment(
        self, way: SegmentWay, function: Callable[..., Any], modules: Sequence[nn.Module], args: Any, kwargs: Any
    ) -> Any:
        if way.kind == AGAIN:
            return computed_again(function, modules, self._changed[way], args, kwargs)
        assert self._moved is not None
        with self._moved.segment() as stays:
            result = function(*args, **kwargs)
            stays += [x for x in tree_leaves(result) if isinstance(x, Tensor) and not way.moves_results]
        return result


def _composed(children: Sequence[nn.Module], x: Any) -> Any:
    for child in children:
        x = child(x)
    return x


UNFORESEEN = (
    "distconv: --memory: a call of {module} has changed {name}, which it had not when its model was followed: it cannot"
    " be computed again in backward; accepted: more memory, or --parts"
)


def computed_again(
    function: Callable[..., Any], modules: Sequence[nn.Module], changed: Sequence[Tensor], args: Any, kwargs: Any
) -> Any:
    """The function's result; backward calls the function again for what autograd would have saved.

    The second call has the random numbers and the autocast of the first. Buffers change once.

    Args:
        function: calls the ``modules``.
        changed: the buffers that it changes; the second call changes copies of their former values.
    Raises:
        RuntimeError: where it changes other buffers, or parameters, attributes, lists or dicts; in backward, where an
            input or a parameter has been changed in place since.
    """
    again = Again(function, modules, changed, (args, kwargs))
    leaves, form = tree_flatten((args, kwargs))
    each = list({id(x): x for x in leaves}.values())
    numbers = {id(x): number for number, x in enumerate(each)}
    places = [numbers[id(x)] for x in leaves]  # Attention tests whether its arguments are one tensor.
    is_first = True

    def run(*each: Any) -> Any:
        nonlocal is_first
        args, kwargs = tree_unflatten([each[place] for place in places], form)
        if is_first:
            is_first = False
            with _refusing_other_changes(modules, changed, (args, kwargs)):
                return function(*args, **kwargs)
        return again(*args, **kwargs)

    return checkpoint(run, *each, use_reentrant=False)


@contextlib.contextmanager
def _refusing_other_changes(modules: Sequence[nn.Module], changed: Sequence[Tensor], given: Any) -> Iterator[None]:
    """RuntimeError where a parameter or buffer of the modules is changed that is not in ``changed``, an attribute or an
    argument."""
    changes = StateChanges()
    changes.watch_values([given])
    for module in modules:
        for each in module.modules():
            changes.watch(each)
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
    changes.look()
    if changes.count:
        names = ", ".join(type(module).__name__ for module in modules)
        raise RuntimeError(UNFORESEEN.format(module=names, name="an attribute or an argument"))
