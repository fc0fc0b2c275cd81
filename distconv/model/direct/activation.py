"""Activation: a tensor of a running model that programs see as a DTensor, and autograd as this rank's plain tensor.

The ``root`` of an activation is an ordinary tensor in autograd's graph: this rank's part. Functions with a direct path
(see `distconv.model.direct.paths`) compute with the roots. Every other function is given a DTensor, which a node of
autograd makes of the root. Its results are activations again, whose roots are made of DTensors in the same way, when
they are needed. If the DTensor exists and is changed in place, or a view of it is, the root is made anew.

The gradient of a root has the layout of the activation: that of a shard, or equal on replicas. The gradient of a
parameter's root is a share instead: the shares of all ranks that have the parameter add up to the gradient.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.model.direct.chains.choice import Coverage
from distconv.model.direct.paths import LEAVES, of_parameters, paths, running
from distconv.model.direct.shaped_layout import ShapedLayout, shaped_layout
from distconv.model.direct.shares import FromRoot, ToRoot, apply
from distconv.rules.whole.copies import check_read
from distconv.tensors.arguments import each_of
from distconv.tensors.dtensors import wrap
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import replace, until_put_back


class Activation(DTensor):
    """See the module. Made by `activation`, `from_dtensor` and `of_parameter`."""

    root: Tensor | None
    dtensor: DTensor | None = None
    version: int  # The version of the DTensor with which the root agrees.
    _place: ShapedLayout
    born_as_root: bool = True  # Whether the DTensor was made of the root, and not the root of the DTensor.
    share: Callable[[Tensor], DTensor] | None = None  # For parameters: makes the DTensor of the root.
    wide: Tensor | None = None
    """Within a chain (`distconv.model.direct.chains`): the root with positions of other ranks beside it."""
    coverage: Coverage | None = None  # Which positions are in ``wide``, by rank.
    wide_version: int = 0  # The version of the DTensor, if there is one, with which ``wide`` agrees.
    cut_out: bool = False  # Whether the root is a part of the wide tensor; else the wide one was made from the root.
    read_wide: bool = False  # Whether a function has read more than the root.
    link: tuple[Any, int] | None = None  # The chain that has made it, and the number of the link there.

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        path = None if running.closed else paths.get(func)
        if len(types) > 1 and running.uses is not None and func not in LEAVES:  # a parameter may be among them
            if path is not None and func in of_parameters:
                result = path(*args, **kwargs)
                if result is not NotImplemented:
                    return result
                path = None
            args, kwargs = running.uses.given(args, kwargs)
        if path is not None:
            result = path(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*as_dtensors(args), **as_dtensors(kwargs))
        return result if running.closed else activations(result)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Called only if a program has bypassed torch's functions, and with them autograd's record of the roots."""
        values = (*args, *(kwargs or {}).values())
        if torch.is_grad_enabled() and any(needs_gradient(value) for value in values):
            raise RuntimeError(
                f"{func}: reached an activation beneath autograd; accepted: functions of torch, and of torch.nn"
            )
        return func(*as_dtensors(args), **as_dtensors(kwargs or {}))

    @property
    def place(self) -> ShapedLayout:
        """The layout; in-place operators such as unsqueeze_ change it."""
        found = self.dtensor
        if found is not None and found._spec is not self._spec:
            spec = self._spec = found._spec
            self._place, self.version = shaped_layout(spec.mesh, tuple(spec.placements), spec.shape), -1
        return self._place

    @property
    def placements(self) -> Any:
        return self.place.placements

    @property
    def device_mesh(self) -> Any:
        return self.place.mesh

    def as_dtensor(self) -> DTensor:
        """The DTensor of this activation, made at the first call."""
        found = self.dtensor
        if found is None:
            root = self.root
            assert root is not None
            if self.share is not None:
                with torch.set_grad_enabled(root.requires_grad):
                    found = self.share(root)
            elif root.requires_grad:
                with torch.enable_grad():
                    found = apply(FromRoot, root, self.place)
            else:
                found = wrap(root, self.place.mesh, self.place.placements, self.place.shape)
                self.root = found._local_tensor  # a copy if the root was not dense
            self.dtensor, self.version, self._spec = found, version_of(found), found._spec
            self.wide_version = self.version
            if found.is_inference():  # it has no version that would show changes
                self.forget_wide()
        return found

    def widest(self) -> Tensor:
        """Within a chain the wide tensor, if there is one; else the root."""
        if self.wide is not None and running.chain is not None:
            if self.dtensor is None:
                return self.wide
            if self.wide_version == version_of(self.dtensor):
                check_read(self.dtensor)
                return self.wide
            self.forget_wide()
        return self.local()

    def local(self) -> Tensor:
        """The root, made anew if the DTensor has changed."""
        found = self.dtensor
        if found is None:
            assert self.root is not None
            return self.root
        check_read(found)
        version = version_of(found)
        if self.root is not None and version == self.version:
            return self.root
        if not found.requires_grad:
            return found._local_tensor
        with torch.enable_grad():
            root: Tensor = apply(ToRoot, found)
        self.root, self.version, self.born_as_root = root, version, False
        return root

    def keep_wide(self, wide: Tensor, coverage: Coverage) -> None:
        """Sets the wide tensor, unless there is a DTensor that could change without a new version."""
        found = self.dtensor
        if found is None or not found.is_inference():
            self.wide, self.coverage, self.wide_version = wide, coverage, 0 if found is None else found._version

    def set_data(self, value: DTensor) -> None:
        """Does what ``x.data = value`` does: gives other elements to the tensors that are in autograd's graph."""
        if value.shape != self.place.shape or value.dtype != self.dtype:
            raise UnsupportedOperation(
                f".data of an activation {tuple(self.place.shape)}, set to {tuple(value.shape)}, {value.dtype};"
                f" accepted: the same shape and dtype"
            )
        for each in (self.root, None if self.dtensor is None else self.dtensor._local_tensor):
            if each is not None:
                each.data = value._local_tensor
        self.forget_wide()

    def forget_root(self) -> None:
        """Lets the root be made anew from the DTensor, which must exist."""
        self.root, self.born_as_root = None, False
        self.forget_wide()

    def forget_wide(self) -> None:
        """Drops the wide tensor."""
        self.wide = self.coverage = None

    @property
    def changed(self) -> bool:
        """Of a parameter: whether its DTensor has been changed in place since the root was made."""
        return self.dtensor is not None and self.version != version_of(self.dtensor)

    @property
    def is_fresh(self) -> bool:
        """Whether there is only the root, so that it may be changed in place."""
        return self.dtensor is None and self.share is None


@until_put_back
def open_functions() -> None:
    """Makes a script's own autograd functions receive DTensors in place of activations, from now on."""
    method = inspect.getattr_static(torch.autograd.Function, "apply")  # of Python, or from torch 2.14 on of C++

    def stock(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(None, cls)(*args, **kwargs)

    @functools.wraps(torch.autograd.Function.apply)
    def given(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if running.uses is not None:
            args, kwargs = running.uses.given(args, kwargs)
        has_activation = any(True for _ in each_of(Activation, (*args, *kwargs.values())))
        running.closed += 1
        try:
            if not has_activation:
                return stock(cls, *args, **kwargs)
            result = stock(cls, *as_dtensors(args), **as_dtensors(kwargs))
        finally:
            running.closed -= 1
        return result if running.closed else activations(result)

    replace(torch.autograd.Function, "apply", classmethod(given))


def activation(root: Tensor, place: ShapedLayout, share: Callable[[Tensor], DTensor] | None = None) -> Activation:
    """The activation of a root. ``share``: see `Activation`."""
    if place.is_contiguous and not root.is_contiguous():
        root = root.contiguous()
    spec = place.specs.get(root.dtype) or place.spec(root.dtype)
    made: Any = DTensor.__new__(Activation, root.detach(), spec, requires_grad=False)
    made._place, made.root = place, root
    if share is not None:
        made.share = share
    return made


def from_dtensor(dtensor: DTensor) -> Activation:
    """The activation of a DTensor on one of our meshes."""
    spec = dtensor._spec
    made: Any = DTensor.__new__(Activation, dtensor._local_tensor, spec, requires_grad=False)
    made._place = shaped_layout(spec.mesh, tuple(spec.placements), spec.shape)
    made.root, made.dtensor, made.version, made.born_as_root = None, dtensor, -1, False
    return made


def activations(result: Any) -> Any:
    """The results of a function, with an activation in place of each DTensor on one of our meshes."""
    kind = type(result)
    if kind is DTensor:
        return from_dtensor(result) if is_ours(result.device_mesh) else result
    if kind is tuple or kind is list or hasattr(kind, "n_sequence_fields"):
        return kind([activations(item) for item in result])
    return result


def as_dtensors(value: Any) -> Any:
    """A value with its DTensor in place of each activation, in lists and dicts too, such as the arguments of a call."""
    if isinstance(value, Activation):
        return value.as_dtensor()
    if isinstance(value, list | tuple) and any(isinstance(item, Activation | list | tuple | dict) for item in value):
        values = [*map(as_dtensors, value)]
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    if type(value) is dict:
        return {name: as_dtensors(item) for name, item in value.items()}
    return value


def needs_gradient(value: Any) -> bool:
    """Whether a value is an activation that requires a gradient, or a list with one."""
    if type(value) is Activation:
        return (value.dtensor if value.root is None else value.root).requires_grad  # type: ignore[union-attr]
    return isinstance(value, list | tuple) and any(needs_gradient(item) for item in value)


def version_of(x: Tensor) -> int:
    """The number of changes of a tensor in place; 0 for an inference tensor, which does not count them."""
    return 0 if x.is_inference() else x._version
