"""Checks around a model's call that its parameters and buffers were not changed in ways that distconv cannot follow.

`distconv.model.direct.parameters` follows all changes by torch's functions. It does not see a parameter that is put
straight into a module's dict of parameters, whose gradient would not be summed over the ranks. And it does not see
writes to a parameter's memory past torch, as by NumPy: these are lost if ranks compute with shards or copies.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh

from distconv.agreement.disagreement import Site
from distconv.agreement.ledger import Ledger, ledger
from distconv.agreement.samples import Key, checksum
from distconv.model.checked_groups import CheckedGroup, CheckedGroups, CheckedState, Place
from distconv.model.replacement import current
from distconv.model.uses import Uses
from distconv.settings import value
from distconv.tensors.mesh import batch_norm_statistics, is_the_programs, uncompared
from distconv.tensors.refusal import UnsupportedOperation

_UNCOUNTED = ("running_mean", "running_var")
"""Buffers that torch's own batch norm changes without increasing their version."""


_groups: weakref.WeakKeyDictionary[nn.Module, CheckedGroups] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def checked(model: nn.Module, modules: Sequence[nn.Module], uses: Uses, mesh: DeviceMesh) -> Iterator[None]:
    """A context in which a model runs, after which its parameters and buffers are checked.

    They are compared with those before the call: by identity, memory, version and some sampled elements. Each call
    checks one group of them, the next call the next one; once all have been checked, only every second call checks.
    Differences follow from the program, so all ranks raise the same error without communication. Allowed changes are
    noted, and the ranks compare them before an optimizer steps. On a device, the elements sampled in a call that
    records gradients are compared in the next call, so that nothing waits. Parts in turn have a check of their own.

    Raises:
        UnsupportedOperation: names what was changed, and says what is accepted.
    """
    first = next(iter(uses.parameters), None)
    if value("check") == "off" or mesh in uncompared or first is None or isinstance(first, FakeTensor):
        yield
        return
    groups = _groups.setdefault(model, CheckedGroups())
    late, groups.late = groups.late, None
    has_unseen = late is not None and late()
    if not (groups.is_due() or has_unseen):
        yield
        return
    with torch._C.DisableTorchFunctionSubclass():
        check = _Check(model, groups.next(modules), uses)
    yield
    with torch._C.DisableTorchFunctionSubclass():
        check.read_again()
        _refuse_unknown(model, check.now, uses)
        if torch.is_grad_enabled() and check.waits_for_a_device:
            groups.late = check.later()
        else:
            has_unseen |= check.has_unseen()
        _refuse_written_copies(model, uses)
        noted = ledger(mesh)
        if noted is not None and (has_unseen or uses.given_out or check.is_known_to_differ()):
            check.note(noted, own_statistics=batch_norm_statistics.get(mesh) == "local")


class _Check:
    """One group of a model's parameters and buffers before and after a call: their versions, and some elements."""

    def __init__(self, model: nn.Module, group: CheckedGroup, uses: Uses) -> None:
        self._model, self._group, self._uses = model, group, uses
        self.before = before = CheckedState(group.places)
        group.samples.of(before.here, before.ids, before.pointers)
        self._words = group.samples.read()
        if before.left:
            left = list(before.left.values())
            group.left.of(left, list(before.left), [x.data_ptr() for x in left])
            self._words_left = group.left.read()

    def read_again(self) -> None:
        """Reads the same after the call. What was read on a device is compared later: that waits."""
        samples, before = self._group.samples, self.before
        self.now = now = CheckedState(self._group.places)
        self._find_left: Callable[[], list[Key]] = list
        if before.left:
            self._find_left = self._group.left.compared(self._words_left, self._group.left.read())
        if now.ids == before.ids and now.pointers == before.pointers:
            self._after = samples.read()
            self._find = samples.compared(self._words, self._after)
        else:
            texts = samples.texts(self._words)
            samples.of(now.here, now.ids, now.pointers)
            self._after = samples.read()
            found = samples.texts(self._after).items()
            self._find = [key for key, text in found if texts.get(key, text) != text].copy

    @property
    def waits_for_a_device(self) -> bool:
        """Whether elements were sampled on a device, whose copies are under way."""
        return any(isinstance(each, Tensor) for each in self._after)

    def has_unseen(self) -> bool:
        """See `_find_unseen`."""
        return self._comparison()(functools.partial(_is_used_itself, self.now, self._uses))

    def later(self) -> Callable[[], bool]:
        """Does what `has_unseen` does when it is called, in a later call of the model."""
        used = {at for at in range(len(self.now.ids)) if _is_used_itself(self.now, self._uses, at)}
        return functools.partial(self._comparison(), used.__contains__)

    def _comparison(self) -> Callable[[Callable[[int], bool]], bool]:
        seen = self._uses.given_out.copy()
        return functools.partial(
            _find_unseen, weakref.ref(self._model), self.before, self.now, seen, self._find, self._find_left
        )

    def is_known_to_differ(self) -> bool:
        """Whether torch has counted a change of what all ranks have whole."""
        before, now = self.before, self.now
        is_same = (before.ids, before.pointers, before.versions) == (now.ids, now.pointers, now.versions)
        return not is_same and before.whole() != now.whole()

    def note(self, noted: Ledger, own_statistics: bool) -> None:
        """Notes the group's elements, which the ranks compare. ``own_statistics``: see `_sites`."""
        group, now, samples = self._group, self.now, self._group.samples
        of = now.ids, now.pointers, own_statistics
        if group.sites[0] != of:
            group.sites = of, _sites(self._model, now, own_statistics, samples.keys())
        what = f"what {type(self._model).__name__} has after a call"
        for sums, (sites, places) in zip(samples.sums(self._after), group.sites[1], strict=True):
            if sites:
                noted.note_together(what, sites, sums if places is None else sums[places])


def _refuse_written_copies(model: nn.Module, uses: Uses) -> None:
    """Refuses writes of other libraries to the copies of sharded parameters that they were handed."""
    for parameter, copy, was in uses.copies:
        if checksum(copy) != was:
            name = next((name for name, x in model.named_parameters() if x is parameter), "")
            raise _refused("parameter", name, model, "was handed to another library as a copy, which was written to")


def _refuse_unknown(model: nn.Module, now: CheckedState, uses: Uses) -> None:
    """Refuses a parameter that was put into a module past `register_parameter`, so that the run does not know it."""
    for own, place in zip(now.ids, now.places, strict=True):
        if own not in uses.meshes and place[1] == "_parameters":
            x = place[0]["_parameters"][place[2]]
            if not is_the_programs(x) and id(current(x)) not in uses.meshes:
                raise _refused(*_named(_paths(model), place), model, "was put into the module's dict")


def _is_used_itself(now: CheckedState, uses: Uses, at: int) -> bool:
    """Whether functions have computed with the memory of a parameter or buffer itself: it is plain, and not copied."""
    return now.ids[at] == id(now.here[at]) and not uses.has_copies(now.here[at])


def _find_unseen(
    model: Any,
    before: CheckedState,
    now: CheckedState,
    seen: set[int],
    find: Callable[[], list[Key]],
    find_left: Callable[[], list[Key]],
    is_used_itself: Callable[[int], bool],
) -> bool:
    """Whether a tensor was changed without a new version, and is none of ``seen`` (the model has read its `.data`).

    Refuses such a change if functions have not computed with the tensor's own memory, and any change of the memory
    that a sharded parameter had before.
    """
    for at, _ in find_left():
        kind, path = _named(_paths(model()), before.places[at])
        raise _refused(kind, path, model(), "was written to, by no function of torch on it,")
    changed = find()
    earlier = dict(zip(before.ids, before.versions, strict=True)) if changed else {}
    found = False
    for own, _ in changed:
        at = now.ids.index(own)
        if earlier.get(own) == now.versions[at] >= 0 and own not in seen and now.places[at][2] not in _UNCOUNTED:
            if not is_used_itself(at):
                kind, path = _named(_paths(model()), now.places[at])
                raise _refused(kind, path, model(), "was written to, by no function of torch on it,")
            found = True
    return found


def _named(paths: Mapping[nn.Module, str], place: Place) -> tuple[str, str]:
    """Says "parameter" or "buffer", and the path."""
    _, kind, name, owner = place
    path = paths.get(owner(), "")  # type: ignore[arg-type]
    return kind[1:-1], f"{path}.{name}" if path else name


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


def _sites(
    model: nn.Module, now: CheckedState, only_parameters: bool, groups: Sequence[tuple[torch.device, Sequence[Key]]]
) -> list[tuple[list[Site], Tensor | None]]:
    """For each device's keys the sites of tensors that are whole on every rank, and their indices unless all are."""
    found: dict[Key, Site] = {}
    paths = _paths(model)
    for place, own, pointer, x in zip(now.places, now.ids, now.pointers, now.here, strict=True):
        kind, path = _named(paths, place)
        if id(x) == own and not (only_parameters and kind == "buffer"):
            found[own, pointer] = Site(f"{kind} {path} of {type(model).__name__}", tuple(x.shape), str(x.dtype), "")
    of_groups: list[tuple[list[Site], Tensor | None]] = []
    for device, keys in groups:
        chosen = [at for at, key in enumerate(keys) if key in found]
        places = None
        if len(chosen) < len(keys):  # pinned, as a copy to a device would otherwise wait for its stream
            pinned = torch.tensor(chosen, device="cpu", dtype=torch.int64, pin_memory=device.type == "cuda")
            places = pinned.to(device, non_blocking=True)
        of_groups.append(([found[keys[at]] for at in chosen], places))
    return of_groups


def _refused(kind: str, path: str, model: nn.Module, how: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{kind} {path} of {type(model).__name__} {how} while the model ran; accepted: module.{path.rpartition('.')[2]}"
        f" = ..., register_{kind}, .data = ..., set_, and functions of torch in place on it or its .data"
    )
