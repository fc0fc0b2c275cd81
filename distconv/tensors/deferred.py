"""A large plain tensor, such as an attention mask of positions, of which only the parts that are read are computed.

A model makes such a mask of small tensors: it compares each position with each, and computes on from there. What it
computes is noted, and the result has a shape and a type, but no elements. A rank that reads its rows of the result
computes these rows, from the operands that they depend on. What cannot be computed by parts is given the whole tensor,
which is then made as torch would have made it.

Operands are copied when they are noted. Before something deferred, or a view of it, is changed in place, it and all
that was computed from it so far are made.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.private_names import DEFERRED, lacks
from distconv.tensors.view_parts import SOURCES, Box, aligned_box
from mucudnn.process import warn

LEAST = 1 << 20  # Elements of the smallest result of a comparison that is deferred.

SHARE = 16  # A plain operand takes at most one part in so many of what the result would take.

aten = torch.ops.aten

POINTWISE = {
    *(getattr(aten, name).Tensor for name in ("le", "lt", "ge", "gt", "eq", "ne")),
    *(getattr(aten, name).Scalar for name in ("le", "lt", "ge", "gt", "eq", "ne")),
    *(getattr(aten, f"bitwise_{name}").Tensor for name in ("and", "or", "xor")),
    *(getattr(aten, f"logical_{name}").default for name in ("and", "or", "xor", "not")),
    *(aten.bitwise_not.default, aten.neg.default, torch.ops.aten._to_copy.default, aten.clone.default),
    *(aten.where.self, aten.masked_fill.Scalar, aten.masked_fill.Tensor),
    *(getattr(aten, name).Tensor for name in ("add", "sub", "mul", "div")),
}
"""Operators each of whose elements depends on those at the same place of its operands, which broadcast to it."""


class Deferred(Tensor):
    """See the module. Made by `deferred`, and by operators that are given one."""

    _func: Any
    _args: Any
    _kwargs: Any
    _made: Tensor | None  # All of it, once that was needed; of a view, once what it is a view of has been settled.
    _is_settled: bool  # Whether it, and all that was computed from it, has been made: it may be changed.
    _users: weakref.WeakSet[Deferred]  # The tensors that are computed from it.

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(not issubclass(kind, Deferred | FakeTensor) and kind is not Tensor for kind in types):
            return NotImplemented  # as a DTensor, which reads its part
        if func in POINTWISE or func in SOURCES:
            if (made := deferred(func, args, kwargs)) is not None:
                return made
        elif (result := func.decompose(*args, **kwargs)) is not NotImplemented:
            return result
        for x in _shared(func, args, kwargs):
            x._settle_family()
        return func(*_whole(args), **_whole(kwargs))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(not issubclass(kind, Deferred | FakeTensor) and kind is not Tensor for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if func in _BENEATH:
            return func(*_whole(args), **_whole(kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def whole(self) -> Tensor:
        """All of it, as a plain tensor."""
        if self._made is not None:
            return self._made
        with torch.no_grad():
            made = self.part(tuple((0, n) for n in self.shape))
        if not self._has_source:
            self._made = made
        return made

    @property
    def _has_source(self) -> bool:
        return self._func in SOURCES

    def part(self, box: Box) -> Tensor:
        """Its elements in a box, as a plain tensor, computed without the others where its operators allow that."""
        if self._made is not None:
            return self._made[tuple(slice(*interval) for interval in box)]
        if self._has_source:
            found = SOURCES[self._func](box, *self._args)
            assert found is not None  # else it would not have been deferred
            source, of_source, again = found
            return again(_part(source, of_source))
        args, kwargs = tree_map_only(Tensor, lambda x: _part(x, aligned_box(box, x.shape)), (self._args, self._kwargs))
        return self._func(*args, **kwargs)

    def operands(self) -> Iterator[Tensor]:
        """The plain tensors that its elements depend on."""
        if self._made is not None:
            yield self._made
            return
        for x in tree_leaves((self._args, self._kwargs)):
            if isinstance(x, Deferred):
                yield from x.operands()
            elif isinstance(x, Tensor):
                yield x

    def _settle_family(self) -> None:
        """Makes it, what it is a view of, all views of that, and what was computed from any of these."""
        source = self
        while source._has_source:
            source = source._args[0]
        source._settle()

    def _settle(self) -> None:
        if not self._is_settled:
            self._made = self._func(*_whole(self._args), **self._kwargs) if self._has_source else self.whole()
            self._is_settled = True
            for user in list(self._users):
                user._settle()


def deferred(func: Any, args: Any, kwargs: Any) -> Deferred | None:
    """The result of an operator, not computed yet; None where it is better computed at once."""
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if line := lacks(DEFERRED):
        warn(line, "distconv")
        return None
    if any(x.requires_grad or x.layout != torch.strided for x in operands):
        return None
    device = max(operands, key=Tensor.dim).device
    if kwargs.get("device", device) not in (None, device):
        return None
    known = [x for x in operands if isinstance(x, Deferred)]
    if any(x._is_settled for x in known):
        return None
    with _disable_current_modes(), torch.no_grad():
        like: Tensor = func(*_shapes(args), **_shapes(kwargs))
    most = like.numel() * like.element_size() // SHARE
    if func in SOURCES:
        if SOURCES[func](tuple((0, n) for n in like.shape), *args) is None:
            return None
    elif any(x.dim() and _bytes(x) > most for x in operands if not isinstance(x, Deferred)):
        return None
    made: Any = Tensor._make_wrapper_subclass(Deferred, like.shape, like.stride(), dtype=like.dtype, device=device)
    made._func, made._made, made._is_settled, made._users = func, None, False, weakref.WeakSet()
    made._args, made._kwargs = tree_map_only(Tensor, _kept, (args, kwargs))
    for x in known:
        x._users.add(made)
    return made


def all_computed(x: Tensor | None) -> Tensor | None:
    """A tensor itself, or all of what was deferred, for who reads all of it."""
    return x.whole() if isinstance(x, Deferred) else x


def begins(x: Any, other: Any) -> bool:
    """Whether the comparison of two small plain tensors makes a large table."""
    if not all(type(value) in (Tensor, FakeTensor) for value in (x, other)):
        return False
    if x.numel() * other.numel() < LEAST:
        return False
    count = math.prod(map(max, zip_longest(reversed(x.shape), reversed(other.shape), fillvalue=1)))
    return count >= LEAST and max(_bytes(x), _bytes(other)) * SHARE <= count


def _whole(values: Any) -> Any:
    return tree_map_only(Deferred, Deferred.whole, values)


def _shapes(values: Any) -> Any:
    """The values with meta tensors of the same shapes and strides in place of tensors."""
    return tree_map_only(
        Tensor, lambda x: torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), values
    )


def _single(x: Tensor) -> Tensor:
    """The tensor with one element along each dim of stride 0, whose elements share their memory."""
    return x[tuple(slice(0, None if step else 1) for step in x.stride())]


def _bytes(x: Tensor) -> int:
    """Bytes of the elements that do not share their memory."""
    return x.element_size() * math.prod(n for n, step in zip(x.shape, x.stride(), strict=True) if step)


def _kept(x: Tensor) -> Tensor:
    return x if isinstance(x, Deferred) else _single(x).clone().expand(x.shape)


def _part(x: Tensor, box: Box) -> Tensor:
    return x.part(box) if isinstance(x, Deferred) else x[tuple(slice(*interval) for interval in box)]


def _shared(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Deferred]:
    """The arguments that an operator changes, or of which it makes a view."""
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None:
            yield from (x for x in tree_leaves(value) if isinstance(x, Deferred))


_BENEATH = {
    *(Tensor.numpy, Tensor.tolist, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__array__, Tensor.__reduce_ex__),
    *(Tensor.__repr__, Tensor.__deepcopy__),
}
"""Methods that ask for the elements, and call no operator for it."""
