"""Converts values of a part into values for the caller: plain, whole tensors, in the caller's own lists and objects."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.model.direct.activation import Activation
from distconv.turns.places_of_state import attribute_place
from distconv.turns.value_kinds import ValueKind, kind_of


class Conversion:
    """Converts a part's values. A value that occurs twice is converted once.

    Args:
        whole: makes the whole tensor of a DTensor.
        originals, entered: see `Copies`; ``originals`` is None for parts whose values the caller does not get.
        known: the ids of the caller's tensors, and of objects whose attributes are converted elsewhere.

    Attributes:
        tensors: the plain tensors among the values.
    """

    def __init__(
        self,
        whole: Callable[[Tensor], Tensor],
        originals: dict[int, Any] | None,
        entered: Mapping[int, Tensor],
        *known: Container[int],
    ) -> None:
        self._whole, self._originals, self._entered, self._known = whole, originals, entered, known
        self.tensors: list[Tensor] = []
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # Keeps converted values alive, as they are known by their ids.

    def value(self, x: Any) -> Any:
        """The caller's value for a part's."""
        kind = kind_of(x)
        if kind is ValueKind.TENSOR:
            if id(x) in self._entered:
                return self._entered[id(x)]
            is_made = isinstance(x, DTensor) or (x.requires_grad and not isinstance(x, nn.Parameter))
            if is_made and not self._is_known(x):
                return self._once(x, lambda: self._of_tensor(x))
            self.tensors.append(x)
            return x
        if kind is ValueKind.CONTAINER:
            return self._once(x, lambda: self._container(x))
        if kind is ValueKind.OBJECT and not self._is_known(x):
            self._once(x, lambda: self._of_object(x))
        return x

    def _of_tensor(self, x: Tensor) -> Tensor:
        """The whole tensor of a part's, with the attributes that the program has set."""
        made = self._whole(x)
        if self._originals is not None:
            own = [(name, item) for name, item in vars(x).items() if not name.startswith("_") and name not in _OWN]
            vars(made).update((name, self.value(item)) for name, item in own)
        return made

    def _is_known(self, x: Any) -> bool:
        return any(id(x) in known for known in self._known)

    def _of_object(self, x: Any) -> Any:
        for name, item in list(attribute_place("", x).read().items()):
            value = self.value(item)
            if value is not item:
                object.__setattr__(x, name, value)
        return x

    def _once(self, x: Any, make: Callable[[], Any]) -> Any:
        if id(x) not in self._made:
            self._kept.append(x)
            self._made[id(x)] = x  # in case it contains itself
            self._made[id(x)] = make()
        return self._made[id(x)]

    def _container(self, x: Any) -> Any:
        if isinstance(x, dict):
            keys = [self.value(key) if isinstance(key, Tensor) else key for key in x]
            items: Any = dict(zip(keys, map(self.value, x.values()), strict=True))
        else:
            items = x if isinstance(x, set) else [self.value(item) for item in x]
        if self._originals is None:
            return x
        found = self._originals.get(id(x), x)
        if _has_items(found, items):
            return found
        if isinstance(x, tuple):
            return type(x)(*items) if hasattr(x, "_fields") else type(x)(items)
        if not isinstance(found, dict) or not _has_keys(found, items):
            found.clear()
        if isinstance(x, dict):
            for key, item in items.items():
                found[key] = item
        elif isinstance(x, set):
            found.update(items)
        else:
            found.extend(items)
        return found


_OWN = frozenset(Activation.__annotations__)
"""Attributes of tensors of parts that are not the program's."""


def _has_keys(container: Any, items: Any) -> bool:
    """Whether a dict has these keys, in this order; tensors are compared by identity."""
    pairs = zip(container, items, strict=False)
    return len(container) == len(items) and all(a is b or (not isinstance(a, Tensor) and a == b) for a, b in pairs)


def _has_items(container: Any, items: Any) -> bool:
    """Whether a container has these very items, in this order."""
    if isinstance(container, set):
        return bool(container == items)
    if isinstance(container, dict):
        return _has_keys(container, items) and all(container[key] is item for key, item in items.items())
    return len(container) == len(items) and all(a is b for a, b in zip(container, items, strict=True))
