"""Blank: a new tensor filled with one number, as `torch.zeros` gives it to a model, until its layout is clear.

Models fill such tensors slice by slice: cost volumes, canvases, padded batches, spectra. Nothing is allocated until
something is written to one, or read from it. When a sharded tensor is written to it, it becomes an activation that is
sharded likewise; in any other case it becomes a plain whole tensor. It stays the same Python object.

A view of a blank tensor is blank too, and becomes a view when its base becomes a tensor. Writes that do not decide the
layout, such as those of numbers, are recorded, and executed once there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils import swap_tensors
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.model.direct.activation import Activation, activation
from distconv.model.direct.paths import is_in_place
from distconv.model.direct.shaped_layout import shaped_layout
from distconv.model.direct.written_layout import written_layout
from distconv.rules.whole import MOST_BYTES, undone
from distconv.tensors.dtensors import memory_format, wrap_strided
from distconv.tensors.layouts import has_partial, local_shape, replicated

MOST_WRITES = 64  # The most writes that are recorded.

_OF_METADATA = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "storage_offset", "element_size"),
    *("is_floating_point", "is_complex", "get_device", "__len__", "__hash__"),
)
"""Methods that read no elements. Most properties do not, either."""

_VIEWS = (
    *("__getitem__", "narrow", "select", "unbind", "split", "chunk", "__iter__", "detach"),
    *("transpose", "permute", "movedim", "swapaxes", "unsqueeze", "squeeze", "t"),
)
_CONVERSIONS = ("to", "cuda", "cpu", "type", "type_as", "float", "double", "half", "bfloat16", "contiguous", "clone")
_ELEMENTS = ("T", "mT", "H", "mH", "real", "imag")  # Properties that are tensors.

_RECORDED = ("__setitem__", "copy_", "fill_", "zero_")


class Whole(Tensor):
    """The class of a plain tensor that was blank. It behaves as an ordinary tensor."""

    __slots__ = ("_local_tensor", "_spec")  # those of DTensor: an object's class can only change to one with its slots
    __torch_function__ = nn.Parameter.__torch_function__  # results are of no subclass

    def __deepcopy__(self, memo: Any) -> Tensor:
        return memo.setdefault(id(self), self.as_subclass(Tensor).__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)


Whole.__name__ = Whole.__qualname__ = "Tensor"
Whole.__module__ = "torch"


class Blank(Activation):
    """See the module. Made by `blank`. A subclass of `Activation`, so that its `__torch_function__` comes first."""

    number: Any  # The value of all its elements.
    like: Tensor  # A meta tensor of the same shape and strides.
    source: Tensor | None  # The tensor that it is a view of, perhaps no longer blank; None if it is no view.
    view_of: Callable[[Any], Any]  # Makes the view of the source.
    writes: list[tuple[Any, Any, Any, bool]]
    """The recorded writes, if it is no view: functions, their arguments, and whether autograd records them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x, name = args[0] if args else None, func.__name__
        if type(x) is Blank:
            if name in _OF_METADATA or (name == "__get__" and func.__self__.__name__ not in _ELEMENTS):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            origin = x.origin
            if type(origin) is Blank:
                if name in _VIEWS or (name in _CONVERSIONS and x is origin and not x.writes):
                    found = (x._views if name in _VIEWS else x._converted)(func, args[1:], kwargs)
                    if found is not None:
                        return found
                elif is_in_place(name):
                    layout = _layout_of_write(x, name, args[1:], kwargs)
                    if layout is not None:
                        origin.shard(*layout)
                    elif origin.records(func, args, kwargs):
                        return None if name == "__setitem__" else x
        for each in (x for x in tree_leaves((args, kwargs)) if type(x) is Blank):
            each.settle()
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(
            f"{func}: reached a new tensor, to which nothing has been written, beneath torch's functions; accepted:"
            " functions of torch, and of torch.nn"
        )

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        self.settle()
        self.data = value

    def as_dtensor(self) -> Any:
        """Settles. Returns the DTensor, or the plain tensor if it has become that."""
        self.settle()
        found: Any = self
        return found.as_dtensor() if isinstance(found, Activation) else found

    @property
    def origin(self) -> Any:
        """The base of a view; the tensor itself if it is none."""
        found: Any = self
        while type(found) is Blank and found.source is not None:
            found = found.source
        return found

    def settle(self) -> None:
        """Becomes a plain whole tensor; a view becomes a view of its source, which settles first if it is blank."""
        if type(self) is not Blank:
            return
        if self.source is None:
            made = torch.empty_strided(
                self.like.shape, self.like.stride(), dtype=self.like.dtype, device=self._local_tensor.device
            )
            self._become(made.fill_(self.number))
        else:
            if type(self.source) is Blank:
                self.source.settle()
            self._become(self.view_of(self.source))

    def shard(self, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        """Becomes an activation of this layout."""
        place = shaped_layout(mesh, tuple(placements), self.like.shape)
        own = local_shape(mesh, placements, self.like.shape)
        form = memory_format(self.like)
        local = torch.empty(own, dtype=self.like.dtype, device=self._local_tensor.device, memory_format=form)
        self._become(activation(local.fill_(self.number), place))

    def _become(self, other: Tensor) -> None:
        writes, self.writes = self.writes, []
        if isinstance(other, FakeTensor):  # its class cannot change: a replicated activation takes its place
            mesh = self.place.mesh
            other = activation(other, shaped_layout(mesh, replicated(mesh), other.shape))
        swap_tensors(self, other if isinstance(other, Activation) else other.as_subclass(Whole))
        for func, args, kwargs, recorded in writes:
            with torch.set_grad_enabled(recorded):
                func(*args, **kwargs)

    def records(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Records a write to it, or to a view of it, of numbers or of small tensors that every rank has whole.

        Returns whether it has.
        """
        values = [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)]
        if func.__name__ not in _RECORDED or len(self.writes) == MOST_WRITES or not all(map(_is_small, values)):
            return False
        if args[0] is self and func.__name__ in ("zero_", "fill_") and not values:
            self.number, self.writes = args[1] if len(args) > 1 else kwargs.get("value", 0), []
            return True
        rest, kwargs = tree_map_only(Tensor, Tensor.clone, (args[1:], kwargs))
        self.writes.append((func, (args[0], *rest), kwargs, torch.is_grad_enabled()))
        return True

    def _views(self, func: Any, rest: Any, kwargs: Any) -> Any:
        """The blank result of a function that makes a view, or several; None if it makes no view."""
        if any(isinstance(x, Tensor) for x in tree_leaves((rest, kwargs))):
            return None
        with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
            found = func(self.like, *rest, **kwargs)
        if isinstance(found, Tensor):
            return self._view(found, lambda x: func(x, *rest, **kwargs)) if found._is_view() else None
        views = [
            self._view(like, lambda x, at=at: list(func(x, *rest, **kwargs))[at])  # type: ignore[misc]
            for at, like in enumerate(found)
        ]
        return iter(views) if func.__name__ == "__iter__" else tuple(views)

    def _converted(self, func: Any, rest: Any, kwargs: Any) -> Any:
        """The blank result of a conversion to a dtype or device; None if the result may have other strides."""
        if "memory_format" in kwargs or (func.__name__ == "contiguous" and (rest or not self.like.is_contiguous())):
            return None
        one = self._local_tensor.new_full((), self.number)
        other = next((x for x in (*rest, *kwargs.values()) if isinstance(x, Tensor)), None)
        found = func(one, *rest, **kwargs) if other is None else one.to(other.device, other.dtype)
        if found is one:
            return self
        if not isinstance(found, Tensor) or found.is_meta:  # the name of a type
            return None
        return blank(self.place.mesh, self.like.to(found.dtype), self.number, found.device)

    def _view(self, like: Tensor, view_of: Callable[[Any], Any]) -> Blank:
        made = _made(self.place.mesh, like, self.number, self._local_tensor.device)
        made.source, made.view_of = self, view_of
        return made


def blank(mesh: DeviceMesh, like: Tensor, number: Any, device: torch.device) -> Blank:
    """A blank tensor filled with a number, for a model on a mesh, with the shape, strides and dtype of ``like``."""
    with _disable_current_modes(), torch.inference_mode(False):
        like = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return _made(mesh, like, number, device)


def _made(mesh: DeviceMesh, like: Tensor, number: Any, device: torch.device) -> Blank:
    local = torch.full((), number, dtype=like.dtype, device=device).expand(like.shape)
    spec = wrap_strided(local, mesh, replicated(mesh), like.shape, like.stride())._spec
    made: Any = DTensor.__new__(Blank, local, spec, requires_grad=False)
    made._place, made.root = shaped_layout(mesh, replicated(mesh), like.shape), local
    made.number, made.like, made.source, made.writes = number, like, None, []
    return made


def _layout_of_write(x: Blank, name: str, rest: Any, kwargs: Any) -> tuple[DeviceMesh, Sequence[Placement]] | None:
    """The layout that a write gives to the base of a blank tensor; None if it does not decide one."""
    for value in tree_leaves((rest, kwargs)):
        if isinstance(value, DTensor) and type(value) is not Blank and undone(value):
            chain: list[Callable[[Any], Any]] = []
            view: Any = x
            while view.source is not None:
                chain.insert(0, view.view_of)
                view = view.source
            layout = written_layout(
                view.like.shape, chain, rest[0] if name == "__setitem__" else (), value.placements, value.shape
            )
            return None if layout is None else (value.device_mesh, layout)
    return None


def _is_small(x: Tensor) -> bool:
    if isinstance(x, DTensor) and (type(x) is Blank or undone(x) or has_partial(x.placements)):
        return False
    return x.numel() * x.element_size() <= MOST_BYTES
