"""The values that parts write to parameters: each part reads its own, and in the end all must have written the same.

A parameter is one tensor for all parts. Every part begins with the caller's values. The values that it writes are in
the parameter while it runs, and are kept here while another part runs. So a model that masks, clamps or averages its
parameters in its call does that as in one process, and not once for each part. Equal values of several parts are kept
once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from distconv.agreement.samples import SampledElements
from distconv.model.direct.activation import version_of
from distconv.model.direct.graphs import follow
from distconv.tensors.read_parts import DATA
from distconv.tensors.refusal import UnsupportedOperation
from distconv.turns.values_of_parts import Contents, Count, Property, Value
from distconv.turns.writes import Writes


class ParameterValues:
    """The values of parameters while parts run.

    Args:
        parameters: with their names.
        release: called with each tensor whose memory a part has given to a parameter, such as by ``.data =``.
    """

    def __init__(
        self, parameters: Iterable[tuple[str, Tensor]], parts: int, release: Callable[[Tensor], None] = lambda _: None
    ) -> None:
        self._parts, self._release = parts, release
        self._names: dict[int, str] = {}
        self._parameters: dict[int, Tensor] = {}
        self._fakes: dict[int, Tensor] = {}  # Fake tensors, of which only the versions are kept.
        self._samples = SampledElements()
        self.add(parameters)

    def add(self, parameters: Iterable[tuple[str, Tensor]]) -> None:
        """Adds parameters, and begins anew with the caller's values."""
        for name, x in parameters:
            if id(x) not in self._names and not (isinstance(x, DTensor) or is_lazy(x) or x.is_meta):
                self._names[id(x)] = name
                (self._fakes if isinstance(x, FakeTensor) else self._parameters)[id(x)] = x
        self.begin()

    def forget(self, gone: Collection[int]) -> None:
        """Drops tensors, by their ids; called before `add`."""
        for key in gone:
            for known in (self._names, self._parameters, self._fakes):
                known.pop(key, None)

    def begin(self) -> None:
        """Takes the present values as the caller's, with which every part begins."""
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
            self._counts = {key: version_of(x) for key, x in (self._parameters | self._fakes).items()}
        self._pointers, self._all_pointers = dict(zip(self._data, pointers, strict=True)), pointers
        self._values: dict[Any, Value] = {}
        """The values that some part has changed, by their kind and the storage or the id of the parameter.

        Kinds: the contents of a storage, a tensor's version count, and its properties, such as "data".
        """
        self._changing: dict[Any, Value] = {}  # Values that the running part has changed since its turn began.
        self._handed_out: dict[Any, Value] = {}  # Values that may change at any time without being noticed.

    def shares_memory(self, x: Tensor) -> bool:
        """Whether a tensor shares the memory of a parameter; one without numbers, whether it is a parameter."""
        return id(x) in self._fakes if isinstance(x, FakeTensor) else _key(x) in self._of_storage

    def watch(self) -> Any:
        """A context for a part's turn, which notes what the part is about to change. Autograd leaves it in backward."""
        if any(isinstance(mode, Writes) for mode in _get_current_function_mode_stack()):
            return contextlib.nullcontext()
        return Writes(self._before_change, self._before_assignment, self._before_handing_out)

    def _note(self, key: Any, make: Callable[[], Value], *callers: Any) -> None:
        """Notes a value that a part is about to change; ``make`` reads the caller's. ``callers``: this value, where the
        part may have changed it already."""
        found = self._values.get(key)
        if found is None:
            with stock():
                found = self._values[key] = make()
            for value in callers:
                found.callers, found.own = value, [value] * self._parts
        self._changing[key] = found

    def _before_change(self, x: Tensor) -> None:
        of_storage = self._of_storage.get(_key(x), ())
        if of_storage:
            storage = x.untyped_storage()
            self._note((Contents, _key(x)), lambda: Contents(of_storage[0], storage, self._parts))
        for each in {id(x): x, **{id(each): each for each in of_storage}}.values():
            if id(each) in self._counts and not each.is_inference():
                self._note((Count, id(each)), functools.partial(Count, each, self._parts), self._counts[id(each)])
        if not any(isinstance(each, nn.Parameter) for each in of_storage):  # it may be changed in a later turn, unseen
            keys = (Contents, _key(x)), *((Count, id(each)) for each in of_storage)
            self._handed_out |= {key: self._values[key] for key in keys if key in self._values}

    def _before_assignment(self, x: Tensor, name: str) -> None:
        if id(x) in self._parameters:
            self._note((name, id(x)), functools.partial(Property, x, self._parts, name))
        if name == "data":
            self._before_change(x)  # resize_ also changes the contents

    def _before_handing_out(self, x: Tensor) -> None:
        self._before_change(x)
        key = Contents, _key(x)
        if key in self._values:
            self._handed_out[key] = self._values[key]

    def checked_result(self, x: Tensor) -> Tensor:
        """Returns a tensor that a model keeps. UnsupportedOperation if a parameter has been given its memory."""
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
                    if isinstance(each.now, Tensor):  # stays on the device, for comparison with those of the next parts
                        self._release(each.now)
            self._changing.clear()

    def _note_moved(self) -> None:
        """Notes the parameters that have other memory now: some functions that replace it are not seen beforehand."""
        with torch._C.DisableTorchFunction():  # called at every turn, so in C
            of_all = list(map(Tensor.data_ptr, self._parameters.values()))
        if of_all == self._all_pointers and not any(kind == "data" for kind, _ in self._values):
            return
        with stock():
            for key, x in self._parameters.items():
                found = self._values.get(("data", key))
                if x.data_ptr() == (self._pointers[key] if found is None else found.now.data_ptr()):
                    continue
                self._note(("data", key), functools.partial(Property, x, self._parts, "data"), self._data[key])
                self._before_change(x)

    def changed(self) -> set[int]:
        """The ids of parameters that some part has changed, or may have."""
        keys = {key for kind, key in self._values if kind is Contents}
        sharing = (x for key in keys for x in self._of_storage.get(key, ()))
        return {*(id(each.parameter) for each in self._values.values()), *map(id, sharing)}

    def unseen(self) -> str | None:
        """The name of a parameter that was changed without being noticed; None if there is none."""
        with stock():
            changed = [key for key, _ in self._samples.changed(self._begun, self._samples.read())]
            changed += [key for key, x in self._parameters.items() if version_of(x) != self._counts[key]]
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
        """Puts the first part's values in place, for the caller. Tensors that graphs of the parts saved follow."""
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
    """An identifier of a tensor's storage."""
    with torch._C.DisableTorchFunction():
        try:
            return x.untyped_storage()._cdata
        except (NotImplementedError, RuntimeError):  # a kind of tensor without a storage
            return -1


@contextlib.contextmanager
def stock() -> Iterator[None]:
    """A context without the modes that a part has entered, such as its pager, which might let values leave."""
    with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.no_grad(), torch.inference_mode(False):
        yield
