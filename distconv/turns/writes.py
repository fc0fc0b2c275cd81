"""Notifies of tensors that a program is about to change in place, before torch's functions do so.

Parts share the parameters of a model. So a parameter has to be noted before a part changes it, through whatever
reference, view or alias.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from distconv.model.direct.activation import Activation
from distconv.model.direct.paths import is_in_place
from distconv.tensors.read_parts import DATA, thread
from distconv.tensors.refusal import UnsupportedOperation

_GRAD: Any = Tensor.grad
_REQUIRES_GRAD: Any = Tensor.requires_grad


def _assigned() -> dict[Any, str]:
    """The setters of tensors' properties, with the properties' names. Torch's own are replaced while parts run."""
    data: Any = Tensor.data
    return {
        **dict.fromkeys((DATA.__set__, data.__set__, Tensor.set_, Tensor.resize_, Tensor.resize_as_), "data"),
        **dict.fromkeys((_GRAD.__set__, _GRAD.__delete__), "grad"),
        **dict.fromkeys((_REQUIRES_GRAD.__set__, Tensor.requires_grad_), "requires_grad"),
    }


_HANDING_OUT = frozenset(
    {Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage}
)
"""The functions that return the memory of a tensor, so that writes to it cannot be seen."""

_BY_OPTION = frozenset({F.embedding, F.embedding_bag, torch.embedding_renorm_})
"""The functions that change their second tensor in place, where max_norm is given."""


class Writes(TorchFunctionMode):
    """While it is entered, ``changes`` is called with each tensor that is about to be changed, as a local tensor.

    ``assigns``: called with a tensor and the name of a property that is about to be assigned. ``hands_out``: with a
    tensor whose memory may be changed from now on without being seen.
    """

    def __init__(
        self,
        changes: Callable[[Tensor], None],
        assigns: Callable[[Tensor, str], None],
        hands_out: Callable[[Tensor], None],
    ) -> None:
        super().__init__()
        self._changes, self._assigns, self._hands_out = changes, assigns, hands_out
        self._assigned = _assigned()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.retain_grad and thread.part is not None:
            raise UnsupportedOperation(
                "parts in turn: retain_grad() within a model's call; accepted: register_hook(), or a module's hook"
            )
        if func in self._assigned:
            refuse_lost_numbers(*args)
        notify = self._notifier(func, kwargs)
        if notify is not None:
            for x in _written(func, args, kwargs):
                notify(x)
        return func(*args, **kwargs)

    def _notifier(self, func: Any, kwargs: Any) -> Callable[[Tensor], None] | None:
        name = self._assigned.get(func)
        if name is not None:
            return lambda x: self._assigns(x, name)
        if func in _HANDING_OUT:
            return self._hands_out
        return self._changes if _writes(func) or "out" in kwargs or func in _BY_OPTION else None


class KeepsNumbers(TorchFunctionMode):
    """While it is entered, `refuse_lost_numbers` looks at what is assigned to tensors."""

    def __init__(self) -> None:
        super().__init__()
        self._assigned = _assigned()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._assigned:
            refuse_lost_numbers(*args)
        return func(*args, **(kwargs or {}))


def refuse_lost_numbers(x: Tensor, value: Any = None, *_: Any) -> None:
    """UnsupportedOperation where a tensor is about to get the data of one without numbers: that is one of the program
    itself, not of the copy of its model that is followed."""
    if isinstance(value, FakeTensor) and type(x) in (Tensor, nn.Parameter):
        raise UnsupportedOperation(
            f"a tensor {tuple(x.shape)} of the program gets data without numbers while a call is followed; accepted:"
            " calls that change tensors of their own model"
        )


@functools.lru_cache(maxsize=4096)
def _writes(func: Any) -> bool:
    """Whether a function changes one of its arguments, by its name."""
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return bool(schema.is_mutable)
    return is_in_place(getattr(func, "__name__", ""))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The plain tensors of this rank that a function changes."""
    if "out" in kwargs:
        yield from _plain(kwargs["out"])
    elif func in _BY_OPTION or getattr(func, "__name__", "").startswith("_fused"):
        for value in (*args, *kwargs.values()):
            yield from _plain(value)
    else:
        for value in args[:1] or kwargs.values():
            yield from _plain(value)


def _plain(value: Any) -> Iterator[Tensor]:
    if isinstance(value, list | tuple):
        for item in value:
            yield from _plain(item)
    elif isinstance(value, Activation):
        found = value.dtensor._local_tensor if value.dtensor is not None else value.root
        if found is not None:
            yield found
    elif isinstance(value, DTensor):
        yield value._local_tensor
    elif isinstance(value, Tensor):
        yield value
