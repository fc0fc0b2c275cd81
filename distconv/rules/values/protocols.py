"""How Python and other libraries copy, pickle and convert a distributed tensor.

A file that a job has written has the whole tensor as a plain one, whatever object it is an attribute of: a process
without distconv can read it.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor

from distconv.private_names import COMPILED, lacks
from distconv.rules.registry import method
from distconv.rules.whole import whole_value
from distconv.tensors.dtensors import wrap
from distconv.tensors.gathering.calls import script_code
from distconv.tensors.gathering.record import PICKLED


@method("__deepcopy__")
def deepcopy(stock: Any, x: DTensor, memo: dict[int, Any]) -> DTensor:
    """A copy of this rank's shard, with its gradient and its attributes unless it is a parameter, as in torch.

    As of any tensor, only of a leaf.
    """
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        return stock(x, memo)
    with torch.no_grad():
        new: Any = wrap(x._local_tensor.clone(), x.device_mesh, x.placements, x.shape)
    if isinstance(x, nn.Parameter):
        memo[id(x)] = nn.Parameter(new, requires_grad=x.requires_grad)
        return memo[id(x)]
    memo[id(x)] = new.requires_grad_(x.requires_grad)
    new.__dict__.update(copy.deepcopy(x.__dict__, memo))
    if x.grad is not None:
        new.grad = copy.deepcopy(x.grad, memo)
    return new


@method("__reduce_ex__")
def reduce_protocol(stock_method: Any, x: DTensor, protocol: int) -> Any:
    """Pickles the whole tensor, with the attributes that a program has set on this one. Collective: it is gathered."""
    with script_code():  # a file is the script's, even where a hook writes it
        whole = whole_value(PICKLED, x.detach()).clone()
    plain = (
        nn.Parameter(whole, x.requires_grad) if isinstance(x, nn.Parameter) else whole.requires_grad_(x.requires_grad)
    )
    plain.__dict__.update(x.__dict__)
    return plain.__reduce_ex__(protocol)


@method("untyped_storage")
def untyped_storage(stock_method: Any, x: DTensor) -> Any:
    """The storage of this rank's shard, which two DTensors share where one process's tensors would share theirs."""
    traced = not lacks(COMPILED) and TracingContext.try_get() is not None
    if traced:  # torch.compile takes a tensor and its shard for two tensors with a storage each
        return stock_method(x)
    return x._local_tensor.untyped_storage()


@method("as_subclass")
def as_subclass(stock: Any, x: DTensor, cls: type) -> DTensor:
    """The DTensor itself: nothing can be a DTensor and an instance of the program's subclass."""
    return x
