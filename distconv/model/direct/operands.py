"""Operands: the tensors that represent one parameter in functions, and the ways of their gradients to a bucket."""

from __future__ import annotations

import functools
import operator
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from distconv.model.direct.activation import Activation
from distconv.model.direct.parameters import InUse
from distconv.model.direct.paths import running
from distconv.model.direct.shaped_layout import ShapedLayout
from distconv.model.gradients import Bucket
from distconv.model.parameter_gathers import State
from distconv.private_names import HOOKED, LAYERS, lacks
from distconv.transfer.stream import Stream


class ParameterOperand:
    """The operand that represents a parameter in functions.

    Attributes:
        tensor: this rank's plain tensor, in autograd's graph; the gradients of others that share its memory go to a
            bucket, where a ``source`` is given.
        place: the layout.
        given: the DTensor or activation of the root, once a function has asked for it.
        version: the version of the tensor when the operand was made; None in inference mode.
        gathered: the state that a fully sharded parameter had when it was gathered; None for others.
        stream: the stream on which the tensor was gathered; None for others.
        several: whether functions may have been given further tensors with its memory.
    """

    __slots__ = (
        *("_is_first", "_root", "_source", "gathered", "given", "place", "several", "stream", "tensor", "version"),
    )

    def __init__(
        self,
        tensor: Tensor,
        place: ShapedLayout,
        source: tuple[Tensor, Bucket, int] | None = None,
        is_first: bool = True,
        gathered: State | None = None,
    ) -> None:
        """``is_first``: whether functions have been given no other tensor whose gradient goes to the bucket."""
        self.tensor, self.place, self.gathered = tensor, place, gathered
        self._source, self._is_first, self._root = source, is_first, tensor if source is None else None
        self.stream = None if gathered is None else Stream(tensor)
        self.given: Tensor | None = None
        self.several = False
        self.version = tensor._version if source is not None or not tensor.is_inference() else None

    @property
    def root(self) -> Tensor:
        """The tensor for functions whose gradient autograd hands to the bucket."""
        if self._root is None:
            assert self._source is not None, "else the tensor is the root"
            _, bucket, number = self._source
            if not self._is_first:
                bucket.expect_one_more(number)
            self._root = arriving(*self._source)
            self._is_first, self.several = False, True
        return self._root

    def handed(self) -> tuple[Tensor, BucketTaker | None]:
        """For a function that gives its gradient to the taker, if there is one; that saves a node of autograd's graph.

        So it is for the first function only, and if that is not computed again.
        """
        if self._root is not None:
            return self._root, None
        if not self._is_first or self._source is None or running.again or not torch.is_grad_enabled() or lacks(LAYERS):
            return self.root, None
        self._is_first = False
        return self.tensor, BucketTaker(*self._source)

    @property
    def changed(self) -> bool:
        """The attribute of the same name of an activation; False for a DTensor."""
        return type(self.given) is Activation and self.given.changed

    def tensors(self) -> list[Tensor]:
        """The plain tensors with the memory of the parameter that functions may have been given."""
        dtensor = self.given.dtensor if type(self.given) is Activation else self.given
        local = None if dtensor is None else dtensor._local_tensor  # type: ignore[attr-defined]
        return [x for x in (self.tensor, self._root, local) if x is not None]

    def versions(self) -> Iterator[tuple[Tensor, int]]:
        """The tensors that functions may have been given, each with the version that it has if nobody changed it."""
        if self.version is not None:
            yield self.tensor, self.version
            if type(self.given) is Activation:
                if self.given.dtensor is not None:
                    yield self.given.dtensor, self.given.version
            elif self.given is not None:
                yield self.given, 0


# An alias keeps the strides. A view of the same shape may not, where an extent is 1, which torch's kernels refuse.
_alias: Callable[[Tensor], Tensor] = operator.itemgetter(...)


class BucketTaker(NamedTuple):
    """Takes the gradient of a parameter from the backward that has computed it."""

    source: Tensor  # Passes the gradient on.
    bucket: Bucket
    number: int  # Of the parameter there.

    def __call__(self, grad: Tensor) -> Tensor:
        finish: Any = self.source.grad_fn
        return self.bucket.take(self.number, grad) if torch._C._will_engine_execute_node(finish) else grad

    def arriving(self, tensor: Tensor) -> Tensor:
        """The tensor for functions that autograd records in backward, whose gradient is another share."""
        self.bucket.expect_one_more(self.number)
        return arriving(tensor, self.bucket, self.number)


def arriving(source: Tensor, bucket: Bucket, index: int, made_of: Callable[[Tensor], Tensor] = _alias) -> Tensor:
    """The root of a parameter, made at its first use, whose gradient goes to a bucket.

    Autograd runs nodes that were made later first, so the gradient arrives as soon as it is complete.
    """
    if torch.is_grad_enabled():
        root = made_of(source)
    else:
        with torch.inference_mode(False), torch.enable_grad():
            root = made_of(source)
    take = functools.partial(bucket.take, index)
    if lacks(HOOKED):
        root.register_hook(take)
    else:  # what register_hook does, in a third of its time
        root._backward_hooks = {0: take}
        root.grad_fn._register_hook_dict(root)  # type: ignore[union-attr]
    return root


_NO_PARAMETER = types.SimpleNamespace(tensor=None, root=None, place=None, given=None, handed=lambda: (None, None))
"""The operand of a bias that a layer does not have."""


def operands(weight: Any, bias: Any) -> tuple[Any, Any] | None:
    """The operands of a layer's weight and bias; without tensor and layout for None.

    The result is None if either is neither a parameter in use nor its activation, or if its DTensor has been changed.
    """
    uses, found = running.uses, []
    for value in (weight, bias):
        own: Any = None
        if value is None:
            own = _NO_PARAMETER
        elif isinstance(value, InUse) and uses is not None:
            own = uses.operand(value)
        elif type(value) is Activation and value.share is not None and not value.changed:
            own = ParameterOperand(value.root, value.place)  # type: ignore[arg-type]
        if own is None or (own.given is not None and own.changed):
            return None
        found.append(own)
    return found[0], found[1]


def converts_operands(x: Tensor) -> bool:
    """Whether autocast is on for a tensor's device; never for meta tensors, with which steps are predicted."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return False  # first, since finding the device of an activation takes several calls
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)
