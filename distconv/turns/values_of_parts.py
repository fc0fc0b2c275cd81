"""Values of parameters of which each part has its own: contents of memory, versions, gradients and other properties."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.tensors.read_parts import DATA


class Value:
    """A value of a parameter that some part has changed, as the caller and each part have it.

    Attributes:
        parameter: for errors.
        callers: the value that the caller had.
        own: the value of each part.
        now: the value that is in place.
    """

    def __init__(self, parameter: Tensor, parts: int) -> None:
        self.parameter = parameter
        self.callers = self.now = self.read()
        self.own = [self.callers] * parts

    def read(self) -> Any:
        """The value that is in place; for contents of memory a copy."""
        raise NotImplementedError

    def write(self, value: Any) -> None:
        """Puts a value in place."""
        raise NotImplementedError

    def put(self, value: Any) -> None:
        if value is not self.now:
            self.write(value)
            self.now = value

    def take(self, part: int) -> None:
        """Notes the value that is in place as that of a part, which has changed it."""
        self.now = self.own[part] = self.read()

    def is_agreed(self) -> bool:
        """Whether all parts have the same value."""
        return True


class Contents(Value):
    """The contents of a storage. Equal contents of several parts are kept once."""

    def __init__(self, parameter: Tensor, storage: torch.UntypedStorage, parts: int) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        super().__init__(parameter, parts)

    def read(self) -> Tensor:
        return self._bytes.clone()

    def write(self, value: Tensor) -> None:
        self._bytes.copy_(value)

    def take(self, part: int) -> None:
        known = {id(each): each for each in (self.callers, *self.own)}.values()
        found = next((each for each in known if torch.equal(each, self._bytes)), None)
        self.now = self.own[part] = self.read() if found is None else found

    def is_agreed(self) -> bool:
        return all(own is self.own[0] for own in self.own)


class Property(Value):
    """A property of a parameter: ``data``, ``grad`` or ``requires_grad``."""

    def __init__(self, parameter: Tensor, parts: int, name: str) -> None:
        # Torch's original setter of data: with distconv's, graphs would follow each turn as a change of the parameter.
        self._property: Any = DATA if name == "data" else getattr(Tensor, name)
        super().__init__(parameter, parts)

    def read(self) -> Any:
        return self._property.__get__(self.parameter)

    def write(self, value: Any) -> None:
        self._property.__set__(self.parameter, value)

    def is_agreed(self) -> bool:
        return all(own is self.own[0] or are_equal(own, self.own[0]) for own in self.own)


class Count(Value):
    """A parameter's version, by which autograd knows whether the tensors that it has kept were changed."""

    def read(self) -> int:
        return self.parameter._version

    def write(self, value: int) -> None:
        torch._C._autograd._unsafe_set_version_counter((self.parameter,), (value,))


def are_equal(a: Any, b: Any) -> bool:
    """Whether two values of a property are the same, to the last bit."""
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return bool(a == b)
    a, b = a.detach(), b.detach()
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))


def _bits(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
