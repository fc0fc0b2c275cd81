"""Steps of torch's optimizers over sharded parameters: they compute with this rank's local tensors, as one list.

Torch's optimizers pass the parameters of a group, their gradients and their state to a function, such as
`torch.optim.adam.adam`, that is elementwise. Here this rank's local tensors replace the DTensors in that call. So a
step costs no more than one without DTensors, whether torch takes one tensor after the other or all at once.
"""

from __future__ import annotations

import gc
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from distconv.tensors.dtensors import local_of, wrap
from distconv.tensors.layouts import has_partial
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import in_place_of, replace, until_put_back


def optimizers() -> list[Optimizer]:
    """All optimizers of the process. Those of objects that the program has frozen (`gc.freeze`) are not found."""
    kinds = {Optimizer}
    while more := {kind for each in kinds for kind in each.__subclasses__()} - kinds:
        kinds |= more
    kinds = {kind for kind in kinds if hasattr(kind.step, "hooked")}  # a mark that its first optimizer has left
    # Faster than all objects, above all for few kinds; `isinstance` could run code of an object.
    return [x for x in gc.get_referrers(*kinds) if type(x) in kinds] if kinds else []


ELEMENTWISE = ("adadelta", "adagrad", "adam", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd")
"""Functions in the modules of `torch.optim` with the same names; AdamW calls that of Adam."""


@until_put_back
def step_on_local_tensors() -> None:
    """Makes torch's optimizers compute with this rank's tensors if all tensors of a step have one layout."""
    for name in ELEMENTWISE:
        module = importlib.import_module(f"torch.optim.{name}")
        replace(module, name, in_place_of(getattr(module, name), _on_local_tensors))


def _on_local_tensors(update: Callable[..., Any], params: list[Tensor], *args: Any, **kwargs: Any) -> None:
    if torch.compiler.is_compiling() or kwargs.get("differentiable"):
        return update(params, *args, **kwargs)
    lists = [arg for arg in (params, *args, *kwargs.values()) if isinstance(arg, list)]
    sharded = [index for index, parameter in enumerate(params) if isinstance(parameter, DTensor)]
    if not sharded or not all(_have_one_layout(params, each) for each in lists):
        return update(params, *args, **kwargs)
    local = {id(each): [local_of(item) for item in each] for each in lists}
    before = {id(each): list(each) for each in lists}
    update(
        local[id(params)],
        *(local.get(id(arg), arg) for arg in args),
        **{name: local.get(id(arg), arg) for name, arg in kwargs.items()},
    )
    for each in lists:  # the function may have put new tensors into a list: SGD does so with its first momentum
        for index, (old, item) in enumerate(zip(before[id(each)], local[id(each)], strict=True)):
            if item is not local_of(old):
                each[index] = _distributed_like(params[index], item)
    torch.autograd.graph.increment_version([params[index] for index in sharded])
    return None


def _have_one_layout(params: Sequence[Tensor], items: Sequence[Any]) -> bool:
    """Whether each item has the layout of its parameter, or is a number."""
    if len(items) != len(params):
        return not items
    for parameter, item in zip(params, items, strict=True):
        if isinstance(item, DTensor):
            spec = item._spec
            if not isinstance(parameter, DTensor) or not is_ours(spec.mesh) or has_partial(spec.placements):
                return False
            own = parameter._spec
            if spec is not own and (spec.placements, spec.shape, spec.mesh) != (own.placements, own.shape, own.mesh):
                return False
        elif isinstance(item, Tensor) and item.dim() and isinstance(parameter, DTensor):
            return False
    return True


def _distributed_like(parameter: Tensor, item: Any) -> Any:
    """A local tensor as a DTensor in the layout of a sharded parameter; anything else as it is."""
    if not isinstance(parameter, DTensor) or not isinstance(item, Tensor) or not item.dim():
        return item
    return wrap(item, parameter.device_mesh, parameter.placements, parameter.shape)
