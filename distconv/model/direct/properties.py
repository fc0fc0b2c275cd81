"""The properties of an activation, and the hooks on its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distconv.model.direct.activation import Activation, activation, as_dtensors
from distconv.model.direct.paths import path, running
from distconv.model.direct.shares import fitting
from distconv.rules.registry import methods
from distconv.tensors.dtensors import wrap
from distconv.tensors.read_parts import DATA
from distconv.tensors.refusal import UnsupportedOperation


def _property(name: str) -> Any:
    return getattr(Tensor, name).__get__


@path(_property("shape"))
def shape(x: Activation, *_: Any) -> torch.Size:
    """The shape of the whole tensor."""
    return x.place.shape


@path(Tensor.size)
def size(x: Activation, dim: int | None = None) -> Any:
    """The shape of the whole tensor, or the extent of one dim."""
    return x.place.shape if dim is None else x.place.shape[dim]


@path(Tensor.dim, Tensor.ndimension, _property("ndim"))
def dims(x: Activation, *_: Any) -> int:
    """The number of dims."""
    return len(x.place.shape)


@path(Tensor.numel, torch.numel)
def element_count(x: Activation) -> int:
    """The number of elements of the whole tensor."""
    return x.place.shape.numel()


def _same(get: Callable[..., Any]) -> None:
    @path(get)
    def of_any(x: Activation, *args: Any) -> Any:
        return get(x.root if x.dtensor is None else x.dtensor, *args)


for _name in ("dtype", "device", "requires_grad", "is_cuda", "layout"):
    _same(_property(_name))
for _method in (Tensor.is_floating_point, torch.is_floating_point, Tensor.is_complex, torch.is_complex):
    _same(_method)


@path(Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def set_requires_grad(x: Activation, requires_grad: bool = True) -> Any:
    """Makes the DTensor of an activation a leaf of autograd's graph, or no longer one; later uses start from it."""
    if x.share is not None or x.requires_grad == requires_grad:
        return NotImplemented
    x.as_dtensor().requires_grad_(requires_grad)
    x.forget_root()
    return x


@path(Tensor.contiguous)
def contiguous(x: Activation, memory_format: Any = torch.contiguous_format) -> Any:
    """The activation itself, if it is contiguous already."""
    if not x.is_fresh or not x.place.is_plain:
        return NotImplemented
    root = x.widest()
    if running.chain is None:
        return x if root.is_contiguous(memory_format=memory_format) else NotImplemented
    # In a chain all ranks must decide the same, though only some of them have roots that are not dense.
    if x.place.is_thin or root.dim() < 3:
        return NotImplemented
    is_last = root.shape[1] > 1 and root.stride(1) == 1
    return x if is_last == (memory_format is not torch.contiguous_format) else NotImplemented


@path(DATA.__get__)
def data(x: Activation, *_: Any) -> Any:
    """Prepares for changes of the DTensor's `data`: if the root has other memory, it is to be made anew afterwards."""
    found = x.as_dtensor()
    if x.root is not None and x.root.data_ptr() != found._local_tensor.data_ptr():
        x.forget_root()
    x.forget_wide()
    return NotImplemented


@path(Tensor.register_hook)
def register_hook(x: Activation, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Registers a hook that is given the gradient as a DTensor."""
    root = _watched(x)
    if root is None:
        return NotImplemented
    place = x.place

    def of_root(grad: Tensor) -> Tensor | None:
        changed = hook(wrap(grad, place.mesh, place.placements, place.shape))
        return None if changed is None else fitting(changed, place)._local_tensor

    return root.register_hook(of_root)


@path(Tensor.retain_grad)
def retain_grad(x: Activation) -> Any:
    """Makes autograd keep the gradient of the root."""
    root = _watched(x)
    return NotImplemented if root is None else root.retain_grad()


@path(_property("grad"))
def grad(x: Activation, *_: Any) -> Any:
    """The gradient that `retain_grad` has kept, as a DTensor."""
    root = _watched(x)
    if root is None or root.grad is None:
        return NotImplemented
    place = x.place
    return wrap(root.grad, place.mesh, place.placements, place.shape)


@path(torch.autograd.grad)
def gradients(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> Any:
    """`torch.autograd.grad` with respect to activations: takes the gradients of their roots where possible."""
    asked: list[Any] = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    roots = [_watched(x) if type(x) is Activation else None for x in asked]
    wanted = [x if root is None else root for x, root in zip(asked, roots, strict=True)]
    found = torch.autograd.grad(*as_dtensors([outputs, wanted, grad_outputs]), **options)
    return tuple(
        value if value is None or root is None else activation(value, x.place).as_dtensor()
        for value, root, x in zip(found, roots, asked, strict=True)
    )


def _watched(x: Activation) -> Tensor | None:
    """The root, if all uses of the activation come from it in autograd's graph; else None."""
    found = x.dtensor
    if running.chain is not None:
        running.chain.watch(x)
    if x.cut_out and x.wide is not None:
        if x.read_wide:
            raise UnsupportedOperation(
                "the gradient of a tensor of which a chain has read more than a rank owns; accepted: in a model's first"
                " call, before the tensor is read, or without halo=chain"
            )
        x.forget_wide()
    if x.share is not None or x.root is None or not x.place.is_plain:
        return None
    return x.root if found is None or (x.born_as_root and x.version == found._version) else None


def _delegate(name: str) -> None:
    def of_dtensor(x: Activation, *args: Any, **kwargs: Any) -> Any:
        return getattr(x.as_dtensor(), name)(*args, **kwargs)

    setattr(Activation, name, of_dtensor)


for _name in (*methods, "to_local", "full_tensor", "redistribute"):
    _delegate(_name)
# As methods of the class they take a third of the time.
Activation.dim, Activation.size = dims, size  # type: ignore[assignment, method-assign]
Activation.shape = property(shape)  # type: ignore[assignment]

# Libraries such as opt_einsum choose a backend by the first name in the module path of a tensor's class.
Activation.__module__ = "torch.distributed.tensor"
