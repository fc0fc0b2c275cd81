"""Gives every part its own copy of a model's state besides parameters: buffers, attributes, globals, lists, dicts.

State is found in places (`distconv.turns.places_of_state`), such as the attributes of an object or a function's
globals. While a part runs, its values are in these places; those of the caller and of the other parts are kept here. In
the end the parts must have made the same changes, and the caller gets the first part's values.
"""

from __future__ import annotations

import collections
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from distconv.model.direct.activation import version_of
from distconv.turns.comparison import agree, are_same, comparable, digest, tensors_of
from distconv.turns.conversion import Conversion
from distconv.turns.copies import Copies, Spare
from distconv.turns.places_of_state import OF_THREAD, Attributes, StatePlace, Values, attribute_place, dict_setter
from distconv.turns.reach import Reach, is_constant
from distconv.turns.value_kinds import IN_PLACE, ValueKind, kind_of
from distconv.turns.values_of_parts import are_equal

_DICT = operator.attrgetter("__dict__")

_REGISTERED = ("_modules", "_parameters")
"""A module's dicts of children and of parameters. Every part has its own; the caller gets the first part's."""

SMALL = 1 << 16
"""Tensors of fewer bytes are compared among parts even if torch has counted no change of them."""


class ModuleState:
    """The values of all places that a call reaches: every part begins with the caller's, and changes its own.

    Parameters are the same tensors in all parts. The first part has the caller's buffers and other tensors, the others
    have copies. The first part also has the caller's own dicts of hooks, from which handles remove hooks.

    ``is_shared``: whether a tensor is the same in all parts. ``enter``: makes a part's replica of a tensor that
    requires gradients.
    """

    def __init__(
        self, reach: Reach, parts: int, is_shared: Callable[[Tensor], bool], enter: Callable[[int, Tensor], Tensor]
    ) -> None:
        named = [*reach.objects, *reach.parameters]
        of_objects = [attribute_place(name, each) for name, each in named]
        dicts = [place for place in of_objects if isinstance(place, Attributes)]
        self._objects = [place.object for place in dicts]
        """The objects with attributes in a dict. Their places come first, and their dicts are exchanged all at once."""
        classes: list[Any] = [type(each) for each in self._objects]
        self._exchanged = [
            (set_dict, [each for _, each in some])
            for set_dict, some in itertools.groupby(
                zip(map(dict_setter, classes), self._objects, strict=True), lambda of: of[0]
            )
        ]
        """The same objects in lists of one class, each with the function that replaces the dict of such an object."""
        others: list[StatePlace] = [place for place in of_objects if not isinstance(place, Attributes)]
        self._of_thread = [place for place in reach.places if isinstance(place, OF_THREAD)]
        others += [place for place in reach.places if not isinstance(place, OF_THREAD)]
        self._others = others
        self._places: list[StatePlace] = [*dicts, *others, *self._of_thread]
        self._classes = [(name, each, type(each)) for name, each in reach.objects if isinstance(each, nn.Module)]
        self._spare = Spare(self)
        self._copies: list[Copies] = [Copies(part, is_shared, enter, self._spare) for part in range(parts)]
        self._known = {id(each) for _, each in named}
        self._registered: list[dict[tuple[int, str], dict[str, Any]]] = [{} for _ in range(parts)]
        """By part, place and kind: all parameters or children of a module in which the part has replaced some."""
        self._arrays = reach.large
        self.begin()

    def begin(self) -> None:
        """Gives every part the values that the caller has now. Lists that a part has copied before stay its copies."""
        self._callers = self._in_place()  # The caller's values, by place; those of the dicts are the dicts themselves.
        copy = self._spare.copy
        self._begun = [copy(of) for of in self._callers]  # What they were at the beginning.
        self._begun_with = [{kind: copy(of.get(kind) or {}) for kind in _REGISTERED} for of in self._callers]
        self._changed: list[dict[tuple[int, str], Any]] = [{} for _ in self._copies]
        """By part, place and name: the changed values, in a form that `agree` compares."""
        self._with_copies = [_with_copies(place, of) for place, of in zip(self._places, self._callers, strict=True)]
        self._own = [self._copied(copies) for copies in self._copies]
        """By part and place: the values while the part does not run."""
        first = self._copies[0].known
        self._pairs = [
            (key, first[key], x, version_of(first[key]) + version_of(x))
            for copies in self._copies[1:]
            for key, x in copies.known.items()
            if type(x) is Tensor and type(first.get(key)) is Tensor and x is not first[key]
        ]
        """The id of a tensor of the caller, the first part's copy, another part's, and the sum of their versions."""
        self._first = [(x, x.detach().clone(), version_of(x)) for x in first.values() if _is_small(x)]
        self._large = [(name, each, digest(each)) for name, each in self._arrays]
        self.left: list[Tensor] = []  # The plain tensors that the first part has put into the caller's places.
        self.replaced: list[Tensor] = []  # The large ones that were there.

    def _copied(self, copies: Copies) -> list[Values]:
        copies.begin()
        result: list[Values] = []
        for of, some in zip(self._callers, self._with_copies, strict=True):
            own = self._spare.copy(of)
            for name, value, is_hooks in some:
                if not is_hooks:
                    own[name] = copies.of(value)
                elif copies.part > 0:
                    own[name] = copies.of(value) if value else self._spare.empty(OrderedDict)
            for kind in _REGISTERED:
                if isinstance(of.get(kind), dict):
                    own[kind] = self._spare.copy(of[kind])
                    own[kind].update(self._registered[copies.part].get((len(result), kind), {}))
            result.append(own)
        return result

    def _in_place(self) -> list[Values]:
        """The values that all places have now."""
        return [*map(_DICT, self._objects), *(place.read() for place in self._places[len(self._objects) :])]

    def gone(self) -> set[int]:
        """The ids of large tensors that the first part has replaced, and that no other place has."""
        here = {id(x) for of in self._callers for x in of.values()} if self.replaced else ()
        return {id(x) for x in self.replaced if id(x) not in here}

    def forget(self, gone: Collection[int]) -> None:
        """Drops tensors, by their ids; called before `begin`."""
        for copies in self._copies:
            copies.forget(gone)
        collections.deque(map(dict.clear, self._begun if gone else ()), maxlen=0)

    def put_back(self) -> None:
        """Gives tensors that the first part shares with the caller their numbers of the beginning."""
        for x, before, version in self._first:
            with torch.inference_mode(x.is_inference()), torch.no_grad():
                x.data.copy_(before)
            if not x.is_inference():
                torch._C._autograd._unsafe_set_version_counter((x,), (version,))

    def arrive(self, part: int | None) -> None:
        """Puts the values of a part in place; those of the caller for None."""
        values = iter(self._callers if part is None else self._own[part])
        for set_dict, objects in self._exchanged:  # in C: this is done for every module at every turn
            collections.deque(map(set_dict, objects, values), maxlen=0)
        for place, own in zip(self._others, values, strict=False):
            place.write(own)

    def enter(self, part: int) -> None:
        """Called first by every part: puts the values in place of which its thread has others than the caller's."""
        self._write_of_thread(self._own[part])

    def _write_of_thread(self, values: list[Values]) -> None:
        for place, own in zip(reversed(self._of_thread), reversed(values), strict=False):
            place.write(own)

    def leave(self, part: int) -> None:
        """Keeps the values of a part, which are in place."""
        self._own[part] = self._in_place()

    def conversion(self, part: int, whole: Callable[[Tensor], Tensor]) -> Conversion:
        """Converts a part's values into values of the caller."""
        copies = self._copies[part]
        return Conversion(whole, copies.originals if part == 0 else None, copies.entered, self._known, copies.known)

    def settle(self, part: int, whole: Callable[[Tensor], Tensor]) -> None:
        """Called by every part when it has computed, while its values are in place: makes its new DTensors whole, notes
        the values that it has changed, and gives those of the first part to the caller."""
        conversion = self.conversion(part, whole)
        copies = {id(x) for x in self._copies[part].known.values()}
        for number, of in enumerate(self._callers):
            own = self._places[number].read()
            differing, gone = _differences(own, self._begun[number])
            changed = self._note_changes(part, number, differing, conversion, copies) if differing else {}
            self._note_registered(part, number, own)
            self._changed[part].update(dict.fromkeys(((number, name) for name in gone), "nothing"))
            if part == 0:
                before = self._begun[number]
                self.replaced += [x for x in map(before.get, changed) if isinstance(x, Tensor) and is_constant(x)]
                of.update(changed)
                for name in gone:
                    of.pop(name, None)
        if part == 0:
            self.left = conversion.tensors

    def _note_changes(
        self, part: int, number: int, differing: list[tuple[Any, Any]], conversion: Conversion, copies: set[int]
    ) -> dict[Any, Any]:
        """Notes the values that a part has changed in a place, and returns those that the caller gets, by name.

        ``copies``: the ids of the part's copies.
        """
        begun, has_hooks, of_caller = self._begun[number], isinstance(self._places[number], Attributes), {}
        for name, x in differing:
            is_of_hooks = has_hooks and "_hooks" in name
            if name in _REGISTERED or (part and is_of_hooks and type(x) is OrderedDict and not x):
                continue
            if self._is_copied_tuple(part, begun.get(name), x):
                continue
            kind = kind_of(x)
            if not is_of_hooks:
                self._changed[part][number, name] = comparable(kind, x, copies)
            if kind is not ValueKind.CONTAINER or x or part == 0:
                of_caller[name] = conversion.value(x)
        return of_caller

    def _note_registered(self, part: int, number: int, own: Values) -> None:
        """Notes the parameters and children of a module of which a part has replaced some."""
        for what, before in self._begun_with[number].items():
            now = own.get(what) or {}
            if list(now) != list(before) or any(map(operator.is_not, now.values(), before.values())):
                self._registered[part][number, what] = dict(now)

    def _is_copied_tuple(self, part: int, before: Any, x: Any) -> bool:
        """Whether a value is the part's copy of a tuple of tensors that the first part shares with the caller."""
        first, own = self._copies[0].known, self._copies[part].known
        return isinstance(before, tuple) and id(before) not in first and own.get(id(before)) is x

    def unshared(self) -> str | None:
        """Says which shared thing a part has changed: the class of a module, which is put back, or a large array."""
        changed = [each for each in self._classes if type(each[1]) is not each[2]]
        for _, module, kind in changed:
            module.__class__ = kind
        if changed:
            return (
                f"gives {changed[0][0]} another class in its call, as parametrizations do that are registered or"
                " removed; accepted: before the call"
            )
        name = next((name for name, array, before in self._large if digest(array) != before), None)
        return name and f"changes {name} in its call, which is an array of more than 1 MiB; accepted: a tensor"

    def new_parameters(self) -> dict[int, tuple[Tensor, Tensor]]:
        """By the id of each parameter that a part has made: it, and the first part's in the same place."""
        found: dict[int, tuple[Tensor, Tensor]] = {}
        for of_part in self._registered[1:]:
            for key, own in of_part.items():
                first = self._registered[0].get(key, {})
                for name in own.keys() & first.keys():
                    found.update(
                        (id(x), (x, y)) for x, y in zip(tensors_of(own[name]), tensors_of(first[name]), strict=True)
                    )
        return found

    def take_registered(self) -> None:
        """Gives the caller's modules the parameters and children that the first part has registered, and the caller's
        thread what the first part's has."""
        self._write_of_thread(self._callers)
        for (number, kind), own in self._registered[0].items():
            of = self._callers[number][kind]
            of.clear()
            of.update(own)

    def disputed(self) -> str | None:
        """The name of a value that the parts have changed in different ways."""
        for of_part in self._registered[1:]:
            for key in {**self._registered[0], **of_part}:
                first, other = self._registered[0].get(key, {}), of_part.get(key, {})
                for name in {**first, **other}:
                    if not are_same(first.get(name), other.get(name)):
                        return f"{self._places[key[0]].name}.{name}"
        facts = self._changed[0]
        for changed in self._changed[1:]:
            for key in (*facts, *changed):
                if not agree(facts.get(key), changed.get(key)):
                    return ".".join(each for each in (self._places[key[0]].name, key[1]) if each)
        for of, own, x, counts in self._pairs:
            is_suspect = own.nbytes < SMALL or version_of(own) + version_of(x) != counts
            if is_suspect and not (torch.equal(own, x) or are_equal(own, x)):
                return self._name(of)
        return None

    def _name(self, key: int) -> str:
        """The name of one of the caller's tensors."""
        for place, begun in zip(self._places, self._begun, strict=True):
            for name, x in begun.items():
                for inner, each in x.items() if isinstance(x, dict) else [(name, x)]:
                    if id(each) == key:
                        return ".".join(str(each) for each in (place.name, inner) if each)
        return "a tensor that it keeps"


def _is_small(x: Any) -> bool:
    return type(x) is Tensor and x.layout is torch.strided and not is_constant(x)


def _differences(own: Values, begun: Values) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """The values that are not those of the beginning, with their names, and the names that are gone."""
    if list(own) == list(begun):  # in C: this is done for every module
        return [*itertools.compress(own.items(), map(operator.is_not, own.values(), begun.values()))], []
    return [(name, x) for name, x in own.items() if x is not begun.get(name)], [x for x in begun if x not in own]


def _with_copies(place: StatePlace, of: Values) -> list[tuple[Any, Any, bool]]:
    """The values of a place that parts may copy, by name, and whether each is a module's hooks."""
    return [
        (name, value, isinstance(place, Attributes) and "_hooks" in name and type(value) is OrderedDict)
        for name, value in of.items()
        if name not in _REGISTERED and kind_of(value) in IN_PLACE
    ]
