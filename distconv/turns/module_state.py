"""What the modules of a model hold besides parameters: every part has its own."""

from __future__ import annotations

import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_SHARED = ("_modules", "_parameters")
_CONTAINERS = (list, dict, OrderedDict, defaultdict, deque, set, tuple)

Hooks = OrderedDict[int, Any]

_spare: list[Hooks] = []
"""Empty dicts of hooks that no call needs any more. A call of a large model takes ten thousands of them; to make so
many anew would set off Python's search for cycles among all objects of the process.
"""


def _without_hooks(taken: list[Hooks]) -> Hooks:
    """A dict without hooks, which is noted as taken."""
    try:
        taken.append(_spare.pop())
    except IndexError:  # also where another thread has taken the last one
        taken.append(OrderedDict())
    return taken[-1]


def _spared(taken: list[Hooks]) -> None:
    """What was taken is free for another call."""
    _spare.extend(hooks for hooks in taken if not hooks)


class ModuleState:
    """The attributes of modules: every part begins with the caller's, and changes its own.

    Parameters are the same tensors in all parts. The first part has the caller's buffers and other tensors, the others
    have copies. What the first part has put into its modules, the caller's get. It also has the caller's own dicts of
    hooks, in which the handles of hooks look for them.
    """

    def __init__(self, modules: Sequence[nn.Module], parts: int) -> None:
        self._modules = modules
        self._callers = [module.__dict__ for module in modules]
        self._originals: dict[int, Any] = {}
        """By the id of a container of the first part: the caller's, of which it is a copy."""
        self._taken: list[Hooks] = []
        weakref.finalize(self, _spared, self._taken).atexit = False
        self._own = [self._copies(part) for part in range(parts)]

    def _copies(self, part: int) -> list[dict[str, Any]]:
        known: dict[int, Any] = {id(p): p for of in self._callers for p in of["_parameters"].values()}
        originals = self._originals if part == 0 else {}
        result = []
        for of in self._callers:
            own = dict(of)
            for name, value in of.items():
                if name in _SHARED or (part == 0 and "_hooks" in name):
                    continue
                if "_hooks" in name and type(value) is OrderedDict and not value:
                    own[name] = _without_hooks(self._taken)
                elif type(value) in _CONTAINERS or isinstance(value, Tensor):
                    own[name] = _copy(value, known, originals, tensors=part > 0)
            own["_parameters"] = dict(of["_parameters"])
            result.append(own)
        return result

    def arrive(self, part: int) -> None:
        for module, own in zip(self._modules, self._own[part], strict=True):
            object.__setattr__(module, "__dict__", own)

    def leave(self, part: int) -> None:
        for module, of in zip(self._modules, self._callers, strict=True):
            object.__setattr__(module, "__dict__", of)

    def settle(self, part: int, whole: Callable[[DTensor], Tensor]) -> None:
        """A part has computed. What it holds of its own of DTensors becomes whole; the caller's modules get what the
        first part's hold. All parts must call it.
        """
        leaving = _Leaving(whole, self._originals if part == 0 else None)
        for own, of in zip(self._own[part], self._callers, strict=True):
            changed = {
                name: leaving.value(x)
                for name, x in own.items()
                if x is not of.get(name) and name not in _SHARED and (part == 0 or type(x) not in _CONTAINERS or x)
            }
            if part == 0:
                of.update(changed)
                for name in [name for name in of if name not in own]:
                    del of[name]


def _copy(value: Any, known: dict[int, Any], originals: dict[int, Any], tensors: bool) -> Any:
    """Containers anew, and tensors where asked for; everything else itself."""
    kind = type(value)
    if kind not in _CONTAINERS and not (tensors and isinstance(value, Tensor)):
        return value
    made = known.get(id(value))
    if made is not None:
        return made
    if isinstance(value, Tensor):
        made = value.detach().clone()
    elif kind is set:
        made = set(value)
    elif isinstance(value, dict):
        made = value.copy()  # of its own kind
        made.update((key, _copy(item, known, originals, tensors)) for key, item in value.items())
    else:
        made = _like(value, (_copy(item, known, originals, tensors) for item in value))
    known[id(value)] = made
    originals[id(made)] = value
    return made


def _like(value: Any, items: Iterator[Any]) -> Any:
    return deque(items, value.maxlen) if isinstance(value, deque) else type(value)(items)


class _Leaving:
    """What a part holds, as the caller is to find it: whole tensors, in the caller's own containers where they are
    copies of these; ``originals`` is None in a part whose values nobody gets.
    """

    def __init__(self, whole: Callable[[DTensor], Tensor], originals: dict[int, Any] | None) -> None:
        self._whole, self._originals = whole, originals
        self._made: dict[int, Any] = {}
        self._held: list[Any] = []

    def value(self, x: Any) -> Any:
        """That of a value."""
        if isinstance(x, DTensor):
            return self._once(x, lambda: self._whole(x))
        if type(x) not in _CONTAINERS:
            return x
        return self._once(x, lambda: self._container(x))

    def _once(self, x: Any, make: Callable[[], Any]) -> Any:
        if id(x) not in self._made:
            self._held.append(x)
            self._made[id(x)] = make()
        return self._made[id(x)]

    def _container(self, x: Any) -> Any:
        if isinstance(x, dict):
            items: Any = {key: self.value(item) for key, item in x.items()}
        else:
            items = x if isinstance(x, set) else [self.value(item) for item in x]
        if self._originals is None:
            return x
        found = self._originals.get(id(x), x)
        if _holds(found, items):
            return found
        if isinstance(x, tuple):
            return _like(x, iter(items))
        found.clear()
        if isinstance(x, dict | set):
            found.update(items)
        else:
            found.extend(items)
        return found


def _holds(container: Any, items: Any) -> bool:
    """Whether a container holds the very items, in their order."""
    if isinstance(container, set):
        return bool(container == items)
    if isinstance(container, dict):
        return list(container) == list(items) and all(container[key] is item for key, item in items.items())
    return len(container) == len(items) and all(a is b for a, b in zip(container, items, strict=True))
