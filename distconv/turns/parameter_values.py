"""The values that parts write to parameters: each part reads its own, and in the end all must have written the same.

Every part begins with the caller's values. The values that it writes are in place while it runs, and are kept aside
while another part does. Equal values of several parts are kept once. So a model that masks, clamps or averages its
parameters does that once, as in one process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from distconv.agreement.samples import SampledElements
from distconv.model.direct.graphs import follow
from distconv.tensors.read_parts import DATA
from distconv.tensors.refusal import UnsupportedOperation
from distconv.turns.values_of_parts import Contents, Count, Property, Value
from distconv.turns.writes import Writes


class ParameterValues:
    """The values of parameters, which are given with their names, while parts run."""

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], parts: int, release: Callable[[Tensor], None] = lambda _: None
    ) -> None:
        """``release``: called with each tensor whose memory a part has given a parameter, such as by ``.data =``."""
        self._parts, self._release = parts, release
        self._names: dict[int, str] = {}
        self._parameters: dict[int, Tensor] = {}
        self._fakes: dict[int, Tensor] = {}  # Parameters without numbers, of which only the counts are kept.
        self._samples = SampledElements()
        self.add(parameters)

    def add(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Adds parameters, and begins anew with the caller's values."""
        for name, x in parameters:
            if id(x) not in self._names and not (isinstance(x, DTensor) or is_lazy(x) or x.is_meta):
                self._names[id(x)] = name
                (self._fakes if isinstance(x, FakeTensor) else self._parameters)[id(x)] = x
        self.begin()

    def begin(self) -> None:
        """Every part begins with the caller's values."""
        self._of_storage: dict[int, list[Tensor]] = {}
        for x in self._parameters.values():
            for each in (x, x.grad if x.is_leaf or x.retains_grad else None):
                if each is not None:
                    self._of_storage.setdefault(_key(each), []).append(x)
        with stock():
            self._data = {key: DATA.__get__(x) for key, x in self._parameters.items()}
            for x in self._data.values():
                self._release(x)
            pointers = list(map(Tensor.data_ptr, self._data.values()))
            self._samples.of(list(self._data.values()), list(self._data), pointers)
            self._begun = self._samples.read()
            self._counts = {key: _count(x) for key, x in (self._parameters | self._fakes).items()}
        self._pointers, self._all_pointers = dict(zip(self._data, pointers, strict=True)), pointers
        self._values: dict[Any, Value] = {}
        """The values that some part has changed: the key is the kind, and the storage or the id of the parameter."""
        self._changing: dict[Any, Value] = {}  # Values that the running part has changed since its turn began.
        self._handed_out: dict[Any, Value] = {}  # Values that may change at any time without being seen.

    def shares_memory(self, x: Tensor) -> bool:
        """Whether a tensor shares the memory of a parameter; one without numbers, whether it is a parameter."""
        return id(x) in self._fakes if isinstance(x, FakeTensor) else _key(x) in self._of_storage

    def watch(self) -> Any:
        """A context for a part's turn, which notes what the part is about to change. Autograd leaves it in backward."""
        if any(isinstance(mode, Writes) for mode in _get_current_function_mode_stack()):
            return contextlib.nullcontext()
        return Writes(self._changes, self._assigns, self._hands_out)

    def _noted(self, key: Any, make: Callable[[], Value]) -> None:
        found = self._values.get(key)
        if found is None:
            with stock():
                found = self._values[key] = make()
        self._changing[key] = found

    def _changes(self, x: Tensor) -> None:
        of_storage = self._of_storage.get(_key(x), ())
        if of_storage:
            storage = x.untyped_storage()
            self._noted((Contents, _key(x)), lambda: Contents(of_storage[0], storage, self._parts))
        for each in {id(x): x, **{id(each): each for each in of_storage}}.values():
            if id(each) in self._counts and not each.is_inference():
                self._found(Count, each, functools.partial(Count, each, self._parts), self._counts[id(each)])
        if not any(isinstance(each, nn.Parameter) for each in of_storage):  # It may change after another part's turn.
            keys = (Contents, _key(x)), *((Count, id(each)) for each in of_storage)
            self._handed_out |= {key: self._values[key] for key in keys if key in self._values}

    def _assigns(self, x: Tensor, name: str) -> None:
        if id(x) in self._parameters:
            self._noted((name, id(x)), functools.partial(Property, x, self._parts, name))
        if name == "data":
            self._changes(x)  # resize_ changes both

    def _hands_out(self, x: Tensor) -> None:
        self._changes(x)
        key = Contents, _key(x)
        if key in self._values:
            self._handed_out[key] = self._values[key]

    def not_given(self, x: Tensor) -> Tensor:
        """A result that a model keeps, as it is. UnsupportedOperation where a parameter has been given its memory."""
        memory = _key(getattr(x, "_local_tensor", x))
        for kind, key in self._values:
            if kind == "data" and not x.requires_grad and _key(self._parameters[key]) == memory != -1:
                raise UnsupportedOperation(
                    f"parts in turn: the parameter {self._names[key]} has been given the memory of a result that the"
                    f" model keeps, {tuple(x.shape)}; accepted: .data = value.clone(), or .data.copy_(value)"
                )
        return x

    def arrive(self, part: int | None) -> None:
        """Puts the values of a part in place."""
        if self._values and part is not None:
            with stock():
                for each in self._values.values():
                    each.put(each.own[part])

    def leave(self, part: int) -> None:
        """Notes the values that a part has written in its turn."""
        self._note_moved()
        changing = {**self._changing, **self._handed_out}
        if changing:
            with stock():
                for each in changing.values():
                    each.take(part)
                    if isinstance(each.now, Tensor):  # The next parts compare theirs with it: it stays on the device.
                        self._release(each.now)
            self._changing.clear()

    def _note_moved(self) -> None:
        """Notes the parameters that have other memory now: a function that replaces it may not be seen beforehand."""
        with torch._C.DisableTorchFunction():  # at every turn, so in C
            of_all = list(map(Tensor.data_ptr, self._parameters.values()))
        if of_all == self._all_pointers and not any(kind == "data" for kind, _ in self._values):
            return
        with stock():
            for key, x in self._parameters.items():
                found = self._values.get(("data", key))
                if x.data_ptr() == (self._pointers[key] if found is None else found.now.data_ptr()):
                    continue
                self._found("data", x, functools.partial(Property, x, self._parts, "data"), self._data[key])
                self._changes(x)

    def _found(self, kind: Any, x: Tensor, make: Callable[[], Value], callers: Any) -> None:
        """Notes a value that a part may have changed already; ``callers``: the caller's value."""
        key = kind, id(x)
        if key not in self._values:
            made = self._values[key] = make()
            made.callers, made.own = callers, [callers] * self._parts
        self._changing[key] = self._values[key]

    def changed(self) -> set[int]:
        """The ids of parameters that some part has changed, or may have."""
        keys = {key for kind, key in self._values if kind is Contents}
        mates = (x for key in keys for x in self._of_storage.get(key, ()))
        return {*(id(each.parameter) for each in self._values.values()), *map(id, mates)}

    def unseen(self) -> str | None:
        """The name of a parameter that was changed without being seen; None where there is none."""
        with stock():
            changed = [key for key, _ in self._samples.changed(self._begun, self._samples.read())]
            changed += [key for key, x in self._parameters.items() if _count(x) != self._counts[key]]
        for key in changed:
            seen = (Count, key), ("data", key), (Contents, _key(self._data[key]))
            if not any(each in self._values for each in seen):
                return self._names[key]
        return None

    def disputed(self) -> str | None:
        """The name of a parameter to which the parts have written different values."""
        with stock():
            found = next((each for each in self._values.values() if not each.is_agreed()), None)
        return None if found is None else self._names[id(found.parameter)]

    def agree(self) -> None:
        """Puts the values of the first part in place, for the caller; graphs of all parts follow to its memory."""
        self.arrive(0)
        for (kind, _), each in self._values.items():
            if kind == "data":
                for own in (each.callers, *each.own):
                    follow(each.parameter, own.data_ptr())

    def put_back(self) -> None:
        """Puts the caller's values back, also those that the running part has changed in this turn."""
        self._note_moved()
        with stock():
            for each in self._values.values():
                each.write(each.callers)


def _key(x: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        try:
            return x.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # a kind without memory of its own
            return -1


def _count(x: Tensor) -> int:
    """How often a tensor was changed."""
    return 0 if x.is_inference() else x._version


class stock:
    """A context without the modes that a part has entered, such as its pager, which might let values leave."""

    def __enter__(self) -> None:
        self._inner: tuple[Any, ...] = (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch.no_grad(),
            torch.inference_mode(False),
        )
        for each in self._inner:
            each.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for each in reversed(self._inner):
            each.__exit__(*exc)
