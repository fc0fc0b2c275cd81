"""The check around a model's call: its parameters and buffers have changed only by what its layers have computed with.

`distconv.model.direct.parameters` sees whatever changes a parameter by torch's functions. What it cannot see, such as a
parameter put straight into a module's dict of parameters, would leave gradients that are not summed over the ranks.
What is written to its memory past torch counts where ranks compute with that memory; in shards or copies it would be
lost.
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

from distconv.agreement.checksum import checksum
from distconv.agreement.disagreement import Site
from distconv.agreement.ledger import ledger
from distconv.agreement.samples import Key, SampledElements
from distconv.model.direct.activation import Activation
from distconv.model.parameters import LEFT, current
from distconv.model.uses import Uses
from distconv.settings import value
from distconv.tensors.mesh import is_the_programs
from distconv.tensors.mesh_options import batch_norm_statistics, uncompared
from distconv.tensors.refusal import UnsupportedOperation

Place = tuple[dict[str, Any], str, str, weakref.ref[nn.Module]]
"""A module's attributes, which of them is its dict of parameters or of buffers, the name there, and the module."""

TENSORS = 16  # So many parameters and buffers are looked at in a call.

_UNCOUNTED = ("running_mean", "running_var")
"""Buffers that torch's own batch norm moves without counting that as a change."""


class _State:
    """Some parameters and buffers at one time, as this rank has them."""

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
        """By place in the lists: the memory of a sharded one from before, which others still have."""
        if not kinds <= {nn.Parameter, Tensor}:
            self.here = [x._local_tensor if isinstance(x, DTensor) else x for x in own]
            sharded = [at for at, (x, here) in enumerate(zip(own, self.here, strict=True)) if x is not here]
            for at in sharded:  # such a one counts what is done to it, or to what this rank has of it
                self.versions[at] += _versions([self.here[at]])[0]
                if (memory := getattr(self.here[at], LEFT, None)) is not None:
                    self.left[at] = memory
        self.pointers = [*map(Tensor.data_ptr, self.here)]

    def whole(self) -> list[tuple[int, int, int]]:
        """What is known of each that every rank has whole: of others a rank may have no elements, which never move."""
        found = zip(self.ids, self.pointers, self.versions, self.here, strict=True)
        return [(own, pointer, version) for own, pointer, version, x in found if own == id(x)]


_VERSION = operator.attrgetter("_version")


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was changed; those made in inference mode are not counted, and have -1."""
    try:
        return [*map(_VERSION, tensors)]
    except RuntimeError:
        return [-1 if x.is_inference() else x._version for x in tensors]


class _Turn:
    """What is looked at in one call."""

    def __init__(self) -> None:
        self.places: Sequence[Place] = ()
        self.samples = SampledElements()
        self.left = SampledElements()  # Of what sharded parameters have left behind, by their places in the lists.
        self.sites: tuple[Any, list[tuple[list[Site], Tensor | None]]] = None, []
        """The sites of what is whole on every rank as `_sites` returns them, and for which state they are."""


class _Kept:
    """What is kept of a model from call to call."""

    def __init__(self) -> None:
        self._turns: list[_Turn] = []
        self._next = self._calls = 0
        self.late: Callable[[], bool] | None = None  # Compares what a device has read in the call before.

    def is_due(self) -> bool:
        """Whether a call is looked at: each one until all tensors have been once, then every second one."""
        self._calls += 1
        return not self._turns or self._calls <= len(self._turns) or self._calls % 2 == 0

    def turn(self, modules: Sequence[nn.Module]) -> _Turn:
        """The next one."""
        if self._next >= len(self._turns):
            found = [
                (vars(each), kind, name, weakref.ref(each))
                for kind in ("_parameters", "_buffers")
                for each in modules
                for name in vars(each)[kind]
            ]
            starts = range(0, max(len(found), 1), TENSORS)
            self._turns = [*self._turns, *(_Turn() for _ in starts)][: len(starts)]
            for each, start in zip(self._turns, starts, strict=True):
                each.places = found[start : start + TENSORS]
            self._next = 0
        self._next += 1
        return self._turns[self._next - 1]


_kept: weakref.WeakKeyDictionary[nn.Module, _Kept] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def checked(model: nn.Module, modules: Sequence[nn.Module], uses: Uses, mesh: DeviceMesh) -> Iterator[None]:
    """A context in which a model runs, that checks what has become of its parameters and buffers.

    Compares them with those before the call, by identity, by memory, by how often torch has changed them, and by some
    elements: `TENSORS` of them, in larger models the next ones in each call, and from when all have been, in every
    second call. What differs follows from what the program has done, so all ranks raise the same error. Nothing is
    sent: what was changed is noted, and compared among the ranks before an optimizer steps. On a device, elements of a
    call that records gradients are compared when the model is called next, so that nothing waits. Parts in turn check
    theirs themselves.

    Raises:
        UnsupportedOperation: names what was changed, and says what is accepted.
    """
    first = next(iter(uses.parameters), None)
    if value("check") == "off" or mesh in uncompared or first is None or isinstance(first, FakeTensor):
        yield
        return
    kept = _kept.setdefault(model, _Kept())
    late, kept.late = kept.late, None
    has_unseen = late is not None and late()
    if not (kept.is_due() or has_unseen):
        yield
        return
    turn = kept.turn(modules)
    samples = turn.samples
    with torch._C.DisableTorchFunctionSubclass():
        before = _State(turn.places)
        samples.of(before.here, before.ids, before.pointers)
        words = samples.read()
        if before.left:
            left = list(before.left.values())
            turn.left.of(left, list(before.left), [x.data_ptr() for x in left])
            words_left = turn.left.read()
    yield
    with torch._C.DisableTorchFunctionSubclass():
        now = _State(turn.places)
        _find_unknown(model, now, uses)
        find_left: Callable[[], list[Key]] = list
        if before.left:
            find_left = turn.left.compared(words_left, turn.left.read())
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
            kept.late = functools.partial(compare, used_themselves.__contains__)
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
            if turn.sites[0] != of:
                turn.sites = of, _sites(model, now, own_statistics, samples.keys())
            what = f"what {type(model).__name__} has after a call"
            for sums, (sites, places) in zip(samples.sums(after), turn.sites[1], strict=True):
                if sites:
                    noted.note_together(what, sites, sums if places is None else sums[places])


def _find_unknown(model: nn.Module, now: _State, uses: Uses) -> None:
    """Refuses a parameter that the call did not know before."""
    for own, place in zip(now.ids, now.places, strict=True):
        if own not in uses.meshes and place[1] == "_parameters":
            x = place[0]["_parameters"][place[2]]
            if not is_the_programs(x) and id(current(x)) not in uses.meshes:
                raise _refused(*_named(_paths(model), place), model, "was put into the module's dict")


def _is_used_itself(now: _State, uses: Uses, at: int) -> bool:
    """Whether a parameter or buffer is whole here, and its own memory is what functions have read."""
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
    """Whether any was changed, is none of ``seen``, and was not counted as changed by torch.

    Refuses that of one that is not used itself, and any of what a sharded parameter has left behind.
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
    """ "parameter" or "buffer", and the path."""
    _, kind, name, owner = place
    path = paths.get(owner(), "")  # type: ignore[arg-type]
    return kind[1:-1], f"{path}.{name}" if path else name


def _paths(model: nn.Module) -> dict[nn.Module, str]:
    return {module: path for path, module in model.named_modules()}


def _sites(
    model: nn.Module, now: _State, only_parameters: bool, groups: Sequence[tuple[torch.device, Sequence[Key]]]
) -> list[tuple[list[Site], Tensor | None]]:
    """Of each group of keys the sites of those that are whole on every rank, and their places where others are not."""
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
        if len(chosen) < len(keys):  # from memory that is not pinned, a copy to a device would wait for its stream
            pinned = torch.tensor(chosen, device="cpu", dtype=torch.int64, pin_memory=device.type == "cuda")
            places = pinned.to(device, non_blocking=True)
        of_groups.append(([found[keys[at]] for at in chosen], places))
    return of_groups


def _refused(kind: str, path: str, model: nn.Module, how: str) -> UnsupportedOperation:
    return UnsupportedOperation(
        f"{kind} {path} of {type(model).__name__} {how} while the model ran; accepted: module.{path.rpartition('.')[2]}"
        f" = ..., register_{kind}, .data = ..., set_, and functions of torch in place on it or its .data"
    )
