"""How a call of a model is computed, and how it is made once more within less memory where memory did not suffice."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.model.direct.paths import is_open
from distconv.model.fully_sharded import is_fully_sharded
from distconv.model.model_modules import every_parameter, modules_of
from distconv.model.whole_calls import why_whole
from distconv.settings.partition import Partition
from distconv.turns.comparison import digest
from distconv.turns.copies import fill_container, is_iterator, iterator_copy
from distconv.turns.mail import ends_all_ranks
from distconv.turns.parameter_values import ParameterValues, stock
from distconv.turns.places_of_state import Attributes, attribute_place
from distconv.turns.random_numbers import RandomNumbers
from distconv.turns.reach import MOST_BYTES, Reach
from distconv.turns.value_kinds import IN_PLACE, ValueKind, kind_of
from distconv.turns.values_of_parts import Contents, Count, Property, Value
from mucudnn.devices.allocations import is_out_of_memory


class Computation(NamedTuple):
    """How a call is computed: in parts whose tensors may take ``memory`` bytes on the device, or whole.

    Attributes:
        call: a function that calls the module, in each part or whole; None: the module is called itself.
        smaller: returns a computation that takes less memory, from the text of an error; None: there is none.
        again: is called before a call in parts, with the module and its arguments. Returns a function that computes
            the whole call once more, differentiably; None where that cannot be.
        gather: in a job of ranks, gathers a text of every rank. Collective.
        within: makes a context in which the call is made.
        ended: is called with the result.
    """

    partition: Partition | None = None
    memory: int | None = None
    call: Callable[..., Any] | None = None
    smaller: Callable[[str], Computation] | None = None
    again: Callable[[nn.Module, Any, Any], Callable[[], Any]] | None = None
    gather: Callable[[str], list[str]] | None = None
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    ended: Callable[[Any], None] | None = None


_IS_META = operator.attrgetter("is_meta")

Choose = Callable[[nn.Module, Any, Any, Sequence[Tensor], str], Computation]
"""Chooses how a call is computed: of a module with its arguments, their tensors, and the kind of device."""


def attempted(
    compute: Callable[[Computation], Any], computation: Computation, module: nn.Module, args: Any, kwargs: Any
) -> Any:
    """The result of a call. Where memory does not suffice, all that the call has changed is undone, and it is made once
    more within less. The error stays, with a note, if that cannot be done."""
    smaller, gather = computation.smaller, computation.gather
    if smaller is None:
        return compute(computation)
    is_in_ranks = gather is not None and computation.partition is None
    undo = None if is_in_ranks else Undo(module, (args, kwargs))
    try:
        with contextlib.nullcontext() if undo is None else undo.watch():
            return compute(computation)
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        lacks, changed = is_out_of_memory(error), ""
        if undo is not None and (gather is None or ends_all_ranks(error)):
            changed = (undo.put_back() or "") if lacks else ""
            if gather is not None:  # All ranks have an error of this call, and come to this.
                lacks, changed = all(gather("lacks" * lacks)), max(gather(changed))
            changed = changed and f"it has changed {changed}"
        else:
            changed = "other ranks may be within it, and wait for this one"
        if changed and lacks:
            error.add_note(f"distconv: --memory: the call is not made again within less, as {changed}")
        if changed or not lacks:
            raise
    return compute(smaller(why))  # Here the error, and with it the tensors of the first call, are gone.


def why_not_in_turn(module: nn.Module, leaves: Sequence[Tensor], may_be_sharded: bool) -> str:
    """Why a call cannot run in turn, whatever its parts; empty if it can. ``may_be_sharded``: if inputs may."""
    if not is_open():
        return "it is called within torch.func or torch.compile"
    parameters = every_parameter(modules_of(module))
    distributed = [x for x in parameters if type(x) is not nn.Parameter and isinstance(x, DTensor)]
    given = not may_be_sharded and any(isinstance(x, DTensor) for x in leaves)
    if given or not all(map(is_fully_sharded, distributed)):
        return "it has distributed tensors"
    if any(map(_IS_META, parameters)) or any(map(_IS_META, leaves)):
        return "its tensors have no numbers"
    if inspect.isgeneratorfunction(module.forward):
        return "its forward is a generator, which computes when the call is over"
    if any(isinstance(x, nn.Parameter) for x in leaves) and any(x.grad_fn is not None for x in leaves):
        return "it is given a parameter beside results of other models, and may ask for its gradient"
    if all(hasattr(type(module), name) for name in ("update", "compute")):
        return "it is a metric, which adds up over calls"
    return why_whole(module, leaves)


class Undo:
    """Undoes a call: keeps the values that it may change, and puts them back. These are parameters, buffers, attributes
    of modules and of other objects, lists, dicts and random numbers, as far as `Reach` finds them, and the arguments.

    Tensors and arrays of up to 1 MiB are copied now, parameters and larger tensors when a function of torch is about to
    change them within `watch`. Larger arrays and iterators are not put back.

    Args:
        given: the arguments of the call.
        tensors: whether those count; not for a call that is followed, with copies of all tensors.
        functions: others that the call may call.
    """

    def __init__(self, module: nn.Module, given: Any = (), tensors: bool = True, functions: Sequence[Any] = ()) -> None:
        reach = Reach(module, given, functions)
        named = [*reach.objects, *reach.parameters]
        places = [*(attribute_place(name, each) for name, each in named), *reach.places]
        self._places = [(place, dict(place.read())) for place in places]
        self._containers: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._kept: list[tuple[str, Any, Any]] = [(name, each, digest(each)) for name, each in reach.large]
        """Values that are not put back: their names, and digests by which a change is found."""
        found: list[tuple[str, Tensor]] = []
        seen: dict[int, Any] = {}
        waiting = [("an argument", given)]
        for place, values in self._places:
            waiting += [(".".join(filter(None, (place.name, str(name)))), value) for name, value in values.items()]
        while waiting:
            name, value = waiting.pop()
            kind = kind_of(value)
            if kind not in IN_PLACE or id(value) in seen:
                continue
            seen[id(value)] = value
            if kind is ValueKind.CONTAINER:
                if not isinstance(value, tuple):
                    self._containers.append((value, dict(value) if isinstance(value, dict) else list(value)))
                waiting += [(name, item) for item in (value.values() if isinstance(value, dict) else value)]
            elif kind is ValueKind.TENSOR and value.layout is torch.strided and not isinstance(value, DTensor):
                found.append((name, value))
                waiting += [(name, item) for item in vars(value).values()]
            elif kind is ValueKind.TENSOR or hasattr(value, "__next__"):
                self._kept.append((name, value, None))
            elif not isinstance(value, np.ndarray) or (value.flags.writeable and value.nbytes <= MOST_BYTES):
                self._arrays.append((value, copy.copy(value)))
        self._attributes = [(vars(x), dict(vars(x))) for _, x in found]
        if not tensors:
            found, reach.parameters = [], []
        small = {id(x): x for _, x in found if x.nbytes <= MOST_BYTES and not isinstance(x, nn.Parameter)}
        late = [*reach.parameters, *((name, x) for name, x in found if id(x) not in small)]
        self._values = ParameterValues(late, 1)
        self._copied: dict[Any, Value] = {}
        with stock():
            for x in small.values():
                if not self._values.shares_memory(x):
                    self._copied["data", id(x)] = Property(x, 1, "data")
                    storage = x.untyped_storage()
                    if storage._cdata not in self._copied:
                        self._copied[storage._cdata] = Contents(x, storage, 1)
                    if not x.is_inference():
                        self._copied["count", id(x)] = Count(x, 1)
        self._numbers = RandomNumbers(1, next((p.device.type for _, p in reach.parameters), "cpu"), reach.generators)

    def lend_iterators(self) -> None:
        """Puts copies of iterators in their places, so that those of the program go on where they are after
        `put_back`. One that cannot be copied raises an error where it is asked for an item."""
        for place, values in self._places:
            if lent := {name: iterator_copy(x) for name, x in values.items() if is_iterator(x)}:
                if isinstance(place, Attributes):
                    place.read().update(lent)
                else:
                    place.write({**values, **lent})
        for container, items in self._containers:
            if any(map(is_iterator, items.values() if isinstance(items, dict) else items)):
                fill_container(container, items, lambda item: iterator_copy(item) if is_iterator(item) else item)

    def watch(self) -> Any:
        """The context in which the call is made."""
        return self._values.watch()

    def put_back(self) -> str | None:
        """Puts values back. Returns the name of one that cannot be put back and may have changed, if there is one."""
        unseen = self._values.unseen()
        self._values.put_back()
        with stock():
            for value in self._copied.values():
                value.write(value.callers)
        for array, before in self._arrays:
            array[... if isinstance(array, np.ndarray) else slice(None)] = before
        for container, items in self._containers:
            fill_container(container, items, lambda item: item)
        for own, kept in self._attributes:
            for attribute in [x for x in own if x not in kept and not x.startswith("_distconv")]:
                del own[attribute]
            own.update(kept)
        for place, values in self._places:
            if isinstance(place, Attributes):
                fill_container(place.read(), values, lambda item: item)
            else:
                place.write(values)
        self._numbers.hand_over()
        return unseen or next((name for name, x, before in self._kept if before is None or digest(x) != before), None)
