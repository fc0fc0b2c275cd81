"""Checks around a model's call that its parameters and buffers were not changed in ways that distconv cannot follow.

`distconv.model.direct.parameters` follows all changes by torch's functions. It does not see a parameter that is put
straight into a module's dict of parameters, whose gradient would not be summed over the ranks. And it does not see
writes to a parameter's memory past torch, as by NumPy: these are lost if ranks compute with shards or copies.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.agreement.disagreement import Site
from distconv.agreement.ledger import ledger
from distconv.agreement.samples import Key, SampledElements, checksum
from distconv.model.direct.activation import Activation
from distconv.model.parameters import LEFT
from distconv.model.replacement import current
from distconv.model.uses import Uses
from distconv.settings import value
from distconv.tensors.mesh import batch_norm_statistics, is_the_programs, uncompared
from distconv.tensors.refusal import UnsupportedOperation

Place = tuple[dict[str, Any], str, str, weakref.ref[nn.Module]]
"""Where a parameter or buffer is: the module's attributes, "_parameters" or "_buffers", its name there, the module."""

TENSORS = 16  # The number of parameters and buffers that are checked in a call.

_UNCOUNTED = ("running_mean", "running_var")
"""Buffers that torch's own batch norm changes without increasing their version."""


class _State:
    """Some parameters and buffers of this rank at one time."""

    def __init__(self, of: Sequence[Place]) -> None:
        found: list[Any] = [state[kind].get(name) for state, kind, name, _ in of]
        kinds = {*map(type, found)}
        own, self.places = found, of
        if not kinds.isdisjoint((type(None), Activation)):
            kept = [
                (place, x) for place, x in zip(of, found, strict=True) if x is not None and type(x) is not Activation
            ]
            self.places, own = [place for place, _ in kept], [x for _, x in kept]
        self.ids = list(map(id, own))
        self.here = own
        self.versions = _versions(own)
        self.left: dict[int, Tensor] = {}
        """By index: the memory that a sharded parameter had before it was sharded, if others still use it."""
        if not kinds <= {nn.Parameter, Tensor}:
            self.here = [x._local_tensor if isinstance(x, DTensor) else x for x in own]
            sharded = [at for at, (x, here) in enumerate(zip(own, self.here, strict=True)) if x is not here]
            for at in sharded:  # its version counts changes of the DTensor and of the local tensor
                self.versions[at] += _versions([self.here[at]])[0]
                if (memory := getattr(self.here[at], LEFT, None)) is not None:
                    self.left[at] = memory
        self.pointers = [*map(Tensor.data_ptr, self.here)]

    def whole(self) -> list[tuple[int, int, int]]:
        """(id, address, version) of each tensor that all ranks have whole. Shards may be empty, and look unchanged."""
        found = zip(self.ids, self.pointers, self.versions, self.here, strict=True)
        return [(own, pointer, version) for own, pointer, version, x in found if own == id(x)]


_VERSION = operator.attrgetter("_version")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """The versions of tensors; -1 for those made in inference mode, which have none."""
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:
        return [-1 if x.is_inference() else x._version for x in tensors]


class _Group:
    """The parameters and buffers that are checked in one call."""

    def __init__(self) -> None:
        self.places: Sequence[Place] = ()
        self.samples = SampledElements()
        self.left = SampledElements()  # Samples of the memory that sharded parameters had before, by index.
        self.sites: tuple[Any, list[tuple[list[Site], Tensor | None]]] = None, []
        """The result of `_sites`, and the state for which it was made."""


class _Groups:
    """A model's parameters and buffers in groups, which are checked in turn."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []
        self._next = self._calls = 0
        self.late: Callable[[], bool] | None = None  # Compares samples that a device has read in the call before.

    def is_due(self) -> bool:
        """Whether this call is checked: each one until all groups have been checked, then every second one."""
        self._calls += 1
        return not self._groups or self._calls <= len(self._groups) or self._calls % 2 == 0

    def next(self, modules: Sequence[nn.Module]) -> _Group:
        """The group that is checked in this call."""
        if self._next >= len(self._groups):
            found = [
                (vars(each), kind, name, weakref.ref(each))
                for kind in ("_parameters", "_buffers")
                for each in modules
                for name in vars(each)[kind]
            ]
            starts = range(0, max(len(found), 1), TENSORS)
            self._groups = [*self._groups, *(_Group() for _ in starts)][: len(starts)]
            for each, start in zip(self._groups, starts, strict=True):
                each.places = found[start : start + TENSORS]
            self._next = 0
        self._next += 1
        return self._groups[self._next - 1]


_groups: weakref.WeakKeyDictionary[nn.Module, _Groups] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def checked(model: nn.Module, modules: Sequence[nn.Module], uses: Uses, mesh: DeviceMesh) -> Iterator[None]:
    """A context in which a model runs, after which its parameters and buffers are checked.

    They are compared with those before the call: by identity, memory, version and some sampled elements. Each call
    checks `TENSORS` of them, the next call the next ones; once all have been checked, only every second call checks.
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
    groups = _groups.setdefault(model, _Groups())
    late, groups.late = groups.late, None
    has_unseen = late is not None and late()
    if not (groups.is_due() or has_unseen):
        yield
        return
    group = groups.next(modules)
    samples = group.samples
    with torch._C.DisableTorchFunctionSubclass():
        before = _State(group.places)
        samples.of(before.here, before.ids, before.pointers)
        words = samples.read()
        if before.left:
            left = list(before.left.values())
            group.left.of(left, list(before.left), [x.data_ptr() for x in left])
            words_left = group.left.read()
    yield
    with torch._C.DisableTorchFunctionSubclass():
        now = _State(group.places)
        _refuse_unknown(model, now, uses)
        find_left: Callable[[], list[Key]] = list
        if before.left:
            find_left = group.left.compared(words_left, group.left.read())
        if now.ids == before.ids and now.pointers == before.pointers:
            after = samples.read()
            find = samples.compared(words, after)
        else:
            texts = samples.texts(words)
            samples.of(now.here, now.ids, now.pointers)
            after = samples.read()
            changed = [key for key, text in samples.texts(after).items() if texts.get(key, text) != text]
            find = changed.copy
        compare = functools.partial(
            _find_unseen, weakref.ref(model), before, now, uses.given_out.copy(), find, find_left
        )
        if torch.is_grad_enabled() and any(isinstance(each, Tensor) for each in after):
            used_themselves = {at for at in range(len(now.ids)) if _is_used_itself(now, uses, at)}
            groups.late = functools.partial(compare, used_themselves.__contains__)
        else:
            has_unseen |= compare(functools.partial(_is_used_itself, now, uses))
        for parameter, copy, was in uses.copies:
            if checksum(copy) != was:
                name = next((name for name, x in model.named_parameters() if x is parameter), "")
                raise _refused(
                    "parameter", name, model, "was handed to another library as a copy, which was written to"
                )
        noted = ledger(mesh)
        if noted is None:
            return
        is_same = (before.ids, before.pointers, before.versions) == (now.ids, now.pointers, now.versions)
        if has_unseen or uses.given_out or (not is_same and before.whole() != now.whole()):
            own_statistics = batch_norm_statistics.get(mesh) == "local"
            of = now.ids, now.pointers, own_statistics
            if group.sites[0] != of:
                group.sites = of, _sites(model, now, own_statistics, samples.keys())
            what = f"what {type(model).__name__} has after a call"
            for sums, (sites, places) in zip(samples.sums(after), group.sites[1], strict=True):
                if sites:
                    noted.note_together(what, sites, sums if places is None else sums[places])


def _refuse_unknown(model: nn.Module, now: _State, uses: Uses) -> None:
    """Refuses a parameter that was put into a module past `register_parameter`, so that the run does not know it."""
    for own, place in zip(now.ids, now.places, strict=True):
        if own not in uses.meshes and place[1] == "_parameters":
            x = place[0]["_parameters"][place[2]]
            if not is_the_programs(x) and id(current(x)) not in uses.meshes:
                raise _refused(*_named(_paths(model), place), model, "was put into the module's dict")


def _is_used_itself(now: _State, uses: Uses, at: int) -> bool:
    """Whether functions have computed with the memory of a parameter or buffer itself: it is plain, and not copied."""
    return now.ids[at] == id(now.here[at]) and not uses.has_copies(now.here[at])


def _find_unseen(
    model: Any,
    before: _State,
    now: _State,
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
    model: nn.Module, now: _State, only_parameters: bool, groups: Sequence[tuple[torch.device, Sequence[Key]]]
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
