"""Tensors that autograd's graphs have saved in place of parameters: they follow if a parameter's `data` is replaced.

In one process a graph has saved the parameter itself. So backward reads the data that the parameter has then, also if
another call of the model or the program has assigned it between forward and backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distconv.rules.operands.own_parts import rebind
from distconv.tensors.read_parts import thread

_saved: dict[int, tuple[int | None, dict[int, weakref.ref[Tensor]]]] = {}
"""By call, or part in turn of one: the part, if any; and by the id of a parameter a tensor that shares its memory."""

_numbers = itertools.count()

_size = {"most": 16}  # When there are more entries in `_saved`, those whose tensors all have been freed are dropped.


def note_saved(parameters: Iterable[int], aliases: Iterable[Tensor]) -> None:
    """Notes tensors that graphs may have saved, each of which has the memory of the parameter with the given id."""
    _saved[next(_numbers)] = thread.part, dict(zip(parameters, map(weakref.ref, aliases), strict=True))
    if len(_saved) > _size["most"]:
        for number, (_, references) in list(_saved.items()):
            if all(reference() is None for reference in references.values()):
                _saved.pop(number, None)  # another thread may have done so
        _size["most"] = max(16, 2 * len(_saved))


def memory(parameter: Tensor) -> int:
    """The address of this rank's part of a parameter; 0 if no graph has saved it."""
    if not any(id(parameter) in each for _, each in list(_saved.values())):
        return 0
    with torch._C.DisableTorchFunctionSubclass():
        return _address(_own(parameter))


def follow(parameter: Tensor, before: int) -> None:
    """Gives the memory that a parameter has now to the tensors that graphs have saved for it.

    Within a part in turn only its own graphs follow: the other parts make the same assignment, or an error is raised.

    ``before``: the address before, which distinguishes the parameter from an earlier one with the same id.
    """
    if before == 0:
        return
    with torch._C.DisableTorchFunctionSubclass():
        own = _own(parameter)
        if _address(own) == before:
            return
        kind = own.shape, own.dtype, own.device
        for part, each in list(_saved.values()):
            reference = each.get(id(parameter)) if thread.part in (None, part) else None
            x = None if reference is None else reference()
            if x is not None and _address(x) == before and (x.shape, x.dtype, x.device) == kind:
                rebind(x, own)


def _address(x: Tensor) -> int:
    """The address of a tensor; that of the storage object for a fake tensor, which has no memory."""
    return x.untyped_storage()._cdata if isinstance(x, FakeTensor) else x.data_ptr()


def _own(parameter: Any) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter)
