"""New tensors within a model's call: large ones are blank until their layout is clear, or computed where they are read.

A blank tensor (`distconv.model.direct.blank`), as of `torch.zeros`, has no memory yet. If the model writes a sharded
tensor to it, it is sharded likewise, so that no rank needs memory for all of it. A comparison of all positions with
all, as in `i[:, None] >= i`, of which a model makes an attention mask, is computed in the parts that are read.
`torch.tensor` of distributed numbers, such as the losses of an epoch, would read the memory of each number, which a
distributed tensor does not have: it gets whole ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._device import _device_constructors

from distconv.model.direct.blank import Blank, blank
from distconv.model.direct.paths import is_open, running
from distconv.model.running import inside
from distconv.model.traces import known_to_script
from distconv.private_names import NEW_TENSORS, lacks
from distconv.rules.whole import MOST_BYTES, whole_value
from distconv.tensors.deferred import begins, deferred
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import in_place_of, replace, until_put_back
from distconv.tensors.user_lines import is_asked_by_program
from mucudnn.process import warn

NUMBERS = {"zeros": 0, "ones": 1, "empty": 0, "full": None}
"""By function: the number that it fills a tensor with; None if that is an argument. ``empty`` fills with zero, so that
elements that are never written are the same on all ranks."""

_OPTIONS = {"dtype", "device", "size", "fill_value"}

MAKERS = ("tensor", "as_tensor", "asarray")  # They receive plain tensors in place of distributed ones in lists.

COMPARISONS = ("le", "lt", "ge", "gt", "eq", "ne")


@until_put_back
def open_new_tensors() -> None:
    """Makes torch's functions, and comparisons by operators, give a running model such tensors from now on."""
    if line := lacks(NEW_TENSORS):
        warn(line, "distconv")
    else:
        _device_constructors()  # torch caches here which functions `with torch.device(...)` concerns: torch's own ones
    for name in MAKERS:
        make = getattr(torch, name)
        replace(torch, name, known_to_script(in_place_of(make, _make), make))
    for name in COMPARISONS:
        method = f"__{name}__"
        compared = functools.partial(_compared, getattr(torch.ops.aten, name).Tensor)
        replace(Tensor, method, in_place_of(getattr(Tensor, method), compared))
    for name, number in () if line else NUMBERS.items():
        for owner, full_name in ((torch, name), (torch, f"{name}_like"), (Tensor, f"new_{name}")):
            stock = getattr(owner, full_name)
            made = functools.partial(_made, number, full_name != name)
            replace(owner, full_name, known_to_script(in_place_of(stock, made), stock))


def _made(number: Any, is_after: bool, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.compiler.is_compiling():
        run = inside.run
        if run is not None and run.direct and is_open() and not running.closed and kwargs.keys() <= _OPTIONS:
            found = _blank(run.mesh, stock, number, args[0] if is_after else None, args, kwargs)
            if found is not None:
                return found
    return stock(*args, **kwargs)


def _blank(mesh: DeviceMesh, stock: Any, number: Any, after: Tensor | None, args: Any, kwargs: Any) -> Tensor | None:
    """The blank result of a function; None where torch is to make an ordinary one.

    That is so if torch or distconv makes it, if it is small, if it is neither real nor complex, and if it has the shape
    of the distributed tensor ``after`` which it is made, and so its layout.
    """
    if not is_asked_by_program():
        return None
    given = kwargs.get("device")
    device = torch.device(given) if given is not None else torch.get_default_device() if after is None else after.device
    if number is None:
        number = kwargs.get("fill_value", args[-1])
    if device.type == "meta" or not isinstance(number, int | float | complex):
        return None
    if after is not None:
        shape, strides = ((0,), (1,)) if stock.__name__.startswith("new_") else (after.shape, after.stride())
        args = torch.empty_strided(shape, strides, dtype=after.dtype, device="meta"), *args[1:]
    like: Tensor = stock(*args, **{**kwargs, "device": "meta"})
    if like.numel() * like.element_size() <= MOST_BYTES or not (like.is_floating_point() or like.is_complex()):
        return None
    if isinstance(after, DTensor) and type(after) is not Blank and like.shape == after.shape:
        return None
    return blank(mesh, like, number, device)


def _make(make: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    return make(_with_whole(data) if isinstance(data, list | tuple) else data, *args, **kwargs)


def _with_whole(values: Any) -> Any:
    """The lists with whole plain tensors in place of distributed ones; a list that has none is returned as it is."""
    if not any(isinstance(value, DTensor | list | tuple) for value in values):
        return values
    return [
        whole_value("torch.tensor", value.detach())
        if isinstance(value, DTensor) and is_ours(value.device_mesh)
        else _with_whole(value)
        if isinstance(value, list | tuple)
        else value
        for value in values
    ]


def _compared(operator: Any, stock: Callable[[Any, Any], Any], x: Any, other: Any) -> Any:
    run = inside.run
    if run is not None and run.direct and begins(x, other) and is_open():
        found = deferred(operator, (x, other), {})
        if found is not None:
            return found
    return stock(x, other)
