"""Graphs of calls that have ended: the tensors that autograd has saved of a parameter, as long as it keeps them.

In one process a graph has saved the parameter itself. So backward reads what was assigned to the parameter's `data`
since, by another call of the model or by the program between forward and backward.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from distconv.rules.operands.derived import rebind

_saved: defaultdict[int, list[weakref.ref[Any]]] = defaultdict(list)
"""By the id of a parameter: tensors of this rank that share its memory."""

_size = {"now": 0, "most": 1024}
"""How many are noted. When there are so many, those that autograd has given up are dropped."""


def note_saved(aliases: Sequence[tuple[int, Tensor]]) -> None:
    """Graphs may have saved these tensors, each in the memory of the parameter whose id is given with it."""
    for parameter, x in aliases:
        _saved[parameter].append(weakref.ref(x))
    _size["now"] += len(aliases)
    if _size["now"] > _size["most"]:
        for parameter, references in list(_saved.items()):
            _saved[parameter] = [each for each in references if each() is not None]
            if not _saved[parameter]:
                del _saved[parameter]
        _size["now"] = sum(map(len, _saved.values()))
        _size["most"] = max(1024, 2 * _size["now"])


def memory(parameter: Tensor) -> int:
    """Where the memory is that this rank has of a parameter; 0 of one that no graph has saved."""
    if id(parameter) not in _saved:
        return 0
    with torch._C.DisableTorchFunctionSubclass():
        return _own(parameter).data_ptr()


def follow(parameter: Tensor, before: int) -> None:
    """Gives the memory that a parameter has now to what graphs have saved of it.

    ``before``: where its memory was, by which it is told from an earlier one with the same id.
    """
    if before == 0:
        return
    with torch._C.DisableTorchFunctionSubclass():
        own = _own(parameter)
        if own.data_ptr() == before:
            return
        kind = own.shape, own.dtype, own.device
        for reference in _saved[id(parameter)]:
            x = reference()
            if x is not None and x.data_ptr() == before and (x.shape, x.dtype, x.device) == kind:
                rebind(x, own)


def _own(parameter: Any) -> Tensor:
    return getattr(parameter, "_local_tensor", parameter)
