"""A segment whose forward is computed again in backward, with the state that it had, by torch's own checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from distconv.turns.turning import not_in_turn

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
    owners = [module._buffers for module, *_ in places]  # a part in turn has others in backward than in forward
    now = [(own, name, own.get(name)) for own, (_, name, _, _) in zip(owners, places, strict=True)]
    for own, (_, name, _, before) in zip(owners, places, strict=True):
        own[name] = before.clone()
    try:
        yield
    finally:
        for own, name, buffer in now:
            own[name] = buffer
