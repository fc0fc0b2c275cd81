"""Tensors with numbers that a call changes while it is followed without numbers: counters in global variables, and the
like. They get their numbers back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from distconv.rules.schemas import changed_tensors

_Kept = tuple[torch.UntypedStorage, torch.UntypedStorage, Tensor, int]

_contexts: list[dict[int, _Kept]] = []
"""What each context of `numbers_kept` keeps that a thread is in: by storage, the storage, a copy of it, a tensor of it,
and the tensor's version. Not of one thread alone, as parts have threads of their own."""


@contextlib.contextmanager
def numbers_kept() -> Iterator[None]:
    """A context at whose end tensors have the numbers, and versions, that they had when it began."""
    found: dict[int, _Kept] = {}
    _contexts.append(found)
    try:
        yield
    finally:
        _contexts[:] = [each for each in _contexts if each is not found]
        for storage, copied, x, version in found.values():
            storage.copy_(copied)
            if version >= 0:
                torch._C._autograd._unsafe_set_version_counter((x,), (version,))


def keep_numbers(func: Any, args: Any, kwargs: Any) -> None:
    """Called before an operator that changes some of its arguments."""
    if not _contexts:
        return
    if any(isinstance(x, FakeTensor) for x in tree_leaves((args, kwargs))):
        return  # It changes a tensor without numbers, or a copy without numbers of a tensor.
    for x in changed_tensors(func, args, kwargs):
        if type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta:
            storage = x.untyped_storage()
            for found in [*_contexts]:
                if storage._cdata not in found:
                    found[storage._cdata] = storage, storage.clone(), x, -1 if x.is_inference() else x._version
