"""Gathers parameters that are sharded along all axes while the parts of a call compute.

Modules then have plain, whole ones. All of a call are gathered before it, and again before its backward; otherwise the
whole ones have no memory. Tensors that autograd saves share that memory, and so have their values again in backward.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from distconv.model.fully_sharded import division, format_of, is_fully_sharded
from distconv.model.parameter_gathers import State
from distconv.model.replacement import replaced_by
from distconv.tensors.read_parts import DATA
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer import group_calls
from distconv.transfer.local_part import local_as

_wholes: Any = WeakIdKeyDictionary()  # By sharded parameter, the whole one that modules have while parts compute.


class GatheredParameters:
    """The parameters that one call of a module gathers. Collective: all ranks make it, and call its methods."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._sharded: list[Any] = [*filter(is_fully_sharded, module.parameters())]
        self._whole: dict[int, nn.Parameter] = {id(x): _whole_of(x) for x in self._sharded}
        self._of_whole: dict[int, DTensor] = {id(self._whole[id(x)]): x for x in self._sharded}
        self._states = [State(x) for x in self._sharded]

    def sharded(self, parameter: Tensor) -> Tensor:
        """The sharded parameter of a whole one; another parameter as it is."""
        return self._of_whole.get(id(parameter), parameter)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the module's parameters are whole."""
        if not self._sharded:
            yield
            return
        taken: list[tuple[dict[str, Any], str, Any, nn.Parameter]] = []
        try:
            self._gather()
            for module in self._module.modules():
                own: dict[str, Any] = module._parameters
                for name, x in own.items():
                    if id(x) in self._whole:
                        taken.append((own, name, x, self._whole[id(x)]))
            for own, name, _, whole in taken:
                own[name] = whole
            with replaced_by(self._whole):
                yield
        finally:
            for own, name, x, whole in taken:
                if own.get(name) is whole:
                    own[name] = x
            for whole in self._whole.values():
                DATA.__get__(whole).untyped_storage().resize_(0)

    def _gather(self) -> None:
        with torch.no_grad(), torch.inference_mode(False), torch._C.DisableTorchFunction():
            works = (division(x).gather(x._local_tensor) for x in self._sharded)
            for (parts, work), x in zip(_one_ahead(works), self._sharded, strict=True):
                group_calls.wait(work)
                data = DATA.__get__(self._whole[id(x)])  # so that autograd counts no change of the parameter
                data.untyped_storage().resize_(data.numel() * data.element_size())
                data.copy_(division(x).whole(parts, format_of(x)))

    def write_back(self, changed: Collection[int]) -> None:
        """Gives the sharded parameters the values that a call has written to whole ones, whose ids are ``changed``.

        Raises:
            UnsupportedOperation: for one that has another shape, type or device now.
        """
        for at, x in enumerate(self._sharded):
            whole = self._whole[id(x)]
            if id(whole) not in changed:
                continue
            if (whole.shape, whole.dtype, whole.device) != (x.shape, x.dtype, x.device):
                raise UnsupportedOperation(
                    f"parts in turn: a parameter {tuple(x.shape)} that is sharded along all axes becomes"
                    f" {tuple(whole.shape)}, {whole.dtype} in forward; accepted: without --shard-parameters"
                )
            with torch.no_grad(), torch.inference_mode(False):
                x._local_tensor.copy_(local_as(DATA.__get__(whole), x.device_mesh, x.placements))
            self._states[at] = State(x)

    def check(self) -> None:
        """RuntimeError, worded as torch's, where a parameter has been changed since the call."""
        for x, state in zip(self._sharded, self._states, strict=True):
            if not state.is_same_data(x):
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation:"
                    f" a parameter {list(x.shape)} that is sharded along all axes, between forward and backward"
                )


def _one_ahead(works: Iterator[Any]) -> Iterator[Any]:
    """The items of an iterator, each of which is begun before the one ahead of it is given out."""
    before: list[Any] = [*itertools.islice(works, 1)]
    for each in works:
        yield before.pop()
        before.append(each)
    yield from before


def _whole_of(parameter: Any) -> nn.Parameter:
    """The whole parameter of a sharded one, without memory."""
    found: nn.Parameter | None = _wholes.get(parameter)
    kind = parameter.shape, parameter.dtype, parameter.device
    if found is None or (found.shape, found.dtype, found.device) != kind:
        with torch.inference_mode(False), torch.no_grad():
            empty = torch.empty(
                parameter.shape, dtype=parameter.dtype, device=parameter.device, memory_format=format_of(parameter)
            )
            found = _wholes[parameter] = nn.Parameter(empty)
            found.__dict__ = parameter.__dict__
        DATA.__get__(found).untyped_storage().resize_(0)
    if found.requires_grad != parameter.requires_grad:
        found.requires_grad_(parameter.requires_grad)
    return found
