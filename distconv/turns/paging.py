"""Notifies a pager of each operator of a call: of the tensors that it reads, and then of those that it has made."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from distconv.rules.operands.once import thread
from distconv.tensors.arguments import each_of
from distconv.tensors.deferred import Deferred
from distconv.turns.in_place import copied_bytes, in_place_form
from distconv.turns.pager import Pager
from distconv.turns.pages import Paged


class Paging(TorchDispatchMode):
    """While it is on in a part's thread, a pager sees all operators on plain tensors, within their call's limit."""

    def __init__(self, pager: Pager, call: Paged) -> None:
        super().__init__()
        self.pager, self.call = pager, call
        self._is_one = False  # Whether what is called now counts as one operator.

    def __enter__(self) -> Paging:
        self._outer, thread.as_one = thread.as_one, self.as_one
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        thread.as_one = self._outer

    def as_one(self, tensors: Sequence[Tensor], compute: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """The result of ``compute``, which reads some tensors; to the pager it is one operator."""
        keys = [x.untyped_storage()._cdata for x in _tensors(tensors)]
        used = self.pager.begin(keys, False, self.call)
        results: tuple[Any, ...] = ()
        self._is_one = True
        try:
            with _disable_current_modes() if self.pager.has_numbers else contextlib.nullcontext():
                results = compute()
        finally:
            self._is_one = False
            self.pager.end(_tensors(results), keys, used, self.call)
        return results

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled in here; else torch would make sure of that at each operator.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and self.pager.has_numbers is False:
            return args[0].fake_device
        kwargs = kwargs or {}
        if types:
            if any(issubclass(kind, _TAKEN_APART) for kind in types):
                return NotImplemented  # torch calls this again with the tensors within these
            if self.pager.has_numbers and any(issubclass(kind, FakeTensor) for kind in types):
                return func(*args, **kwargs)
        if self._is_one or func in _READS_NOTHING:
            return func(*args, **kwargs)
        keys = [x.untyped_storage()._cdata for x in _tensors((*args, *kwargs.values()))]
        least = self.call.limit // 2 if self.pager.has_numbers else 0
        copied = copied_bytes(func, args, kwargs, least)
        used = self.pager.begin(keys, func._schema.is_mutable, self.call, copied)
        results: list[Tensor] = []
        try:
            copy = self.pager.copy_of(args[0]) if copied else None
            result = func(*args, **kwargs) if copy is None else in_place_form(func)(copy, *args[1:], **kwargs)
            results = _tensors((result,))
        finally:
            self.pager.end(results, keys, used, self.call)
        return result


_TAKEN_APART = DTensor, Deferred, AsyncCollectiveTensor

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
_READS_NOTHING = {_aten.detach.default, _aten.alias.default, _aten.view.default, _DEVICE}
"""Operators that accept an empty storage. Tensors without numbers are asked for their device by one, others are not."""


def _tensors(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among values that have a storage of their own."""
    every = each_of(Tensor, values)
    return [x for x in every if x.layout == torch.strided and not isinstance(x, AsyncCollectiveTensor)]
