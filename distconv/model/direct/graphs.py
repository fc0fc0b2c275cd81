"""Graphs of calls that have ended: the tensors that autograd has saved of a parameter, as long as it keeps them.

In one process a graph has saved the parameter itself. So backward reads what was assigned to the parameter's `data`
since, by another call of the model or by the program between forward and backward.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distconv.rules.operands.derived import rebind
from distconv.tensors.read_parts import thread

_saved: dict[int, tuple[int | None, dict[int, weakref.ref[Tensor]]]] = {}
"""By number, of a call or a part of one: the part in turn, and by the ids of parameters what shares their memory."""

_numbers = itertools.count()

_size = {"most": 16}  # How many are kept. When there are more, those whose tensors autograd has given up are dropped.


def note_saved(parameters: Iterable[int], aliases: Iterable[Tensor]) -> None:
    """Graphs may have saved these tensors, each in the memory of the parameter whose id is in its place."""
    _saved[next(_numbers)] = thread.part, dict(zip(parameters, map(weakref.ref, aliases), strict=True))
    if len(_saved) > _size["most"]:
        for number, (_, references) in list(_saved.items()):
            if all(reference() is None for reference in references.values()):
                _saved.pop(number, None)  # which another thread may have done
        _size["most"] = max(16, 2 * len(_saved))


def memory(parameter: Tensor) -> int:
    """Where the memory is that this rank has of a parameter; 0 of one that no graph has saved."""
    if not any(id(parameter) in each for _, each in list(_saved.values())):
        return 0
    with torch._C.DisableTorchFunctionSubclass():
        return _address(_own(parameter))


def follow(parameter: Tensor, before: int) -> None:
    """Gives the memory that a parameter has now to what graphs have saved of it.

    Within a part in turn, to its own graphs: the other parts will come to the same, or not, and then to an error.

    ``before``: where its memory was, which distinguishes it from an earlier one with the same id.
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
    """Where the memory of a tensor is; of one that is followed by shapes, where its storage is."""
    return x.untyped_storage()._cdata if isinstance(x, FakeTensor) else x.data_ptr()


def _own(parameter: Any) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter)
