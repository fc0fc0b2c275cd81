"""A model's parameters and buffers in groups, of which each call of the model checks one (`state_check`)."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distconv.agreement.disagreement import Site
from distconv.agreement.samples import SampledElements
from distconv.model.direct.activation import Activation
from distconv.model.parameters import LEFT

Place = tuple[dict[str, Any], str, str, weakref.ref[nn.Module]]
"""Where a parameter or buffer is: the module's attributes, "_parameters" or "_buffers", its name there, the module."""

TENSORS = 16  # The number of parameters and buffers that are checked in a call.


class CheckedState:
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


class CheckedGroup:
    """The parameters and buffers that are checked in one call."""

    def __init__(self) -> None:
        self.places: Sequence[Place] = ()
        self.samples = SampledElements()
        self.left = SampledElements()  # Samples of the memory that sharded parameters had before, by index.
        self.sites: tuple[Any, list[tuple[list[Site], Tensor | None]]] = None, []
        """The result of `_sites`, and the state for which it was made."""


class CheckedGroups:
    """A model's parameters and buffers in groups, which are checked in turn."""

    def __init__(self) -> None:
        self._groups: list[CheckedGroup] = []
        self._next = self._calls = 0
        self.late: Callable[[], bool] | None = None  # Compares samples that a device has read in the call before.

    def is_due(self) -> bool:
        """Whether this call is checked: each one until all groups have been checked, then every second one."""
        self._calls += 1
        return not self._groups or self._calls <= len(self._groups) or self._calls % 2 == 0

    def next(self, modules: Sequence[nn.Module]) -> CheckedGroup:
        """The group that is checked in this call."""
        if self._next >= len(self._groups):
            found = [
                (vars(each), kind, name, weakref.ref(each))
                for kind in ("_parameters", "_buffers")
                for each in modules
                for name in vars(each)[kind]
            ]
            starts = range(0, max(len(found), 1), TENSORS)
            self._groups = [*self._groups, *(CheckedGroup() for _ in starts)][: len(starts)]
            for each, start in zip(self._groups, starts, strict=True):
                each.places = found[start : start + TENSORS]
            self._next = 0
        self._next += 1
        return self._groups[self._next - 1]
