"""copy.deepcopy of distributed tensors, for example of a module with sharded parameters and their gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from distconv.dtensors import wrap
from distconv.rules.registry import method


@method("__deepcopy__")
def deepcopy(stock: Any, x: DTensor, memo: dict[int, Any]) -> DTensor:
    """A copy of this rank's shard, its gradient and its attributes. As of any tensor, only of a leaf."""
    if id(x) in memo:
        return memo[id(x)]
    if not x.is_leaf:
        return stock(x, memo)
    with torch.no_grad():
        new: Any = wrap(x._local_tensor.clone(), x.device_mesh, x.placements, x.shape)
    if isinstance(x, nn.Parameter):
        new = nn.Parameter(new, requires_grad=x.requires_grad)
    else:
        new.requires_grad_(x.requires_grad)
    memo[id(x)] = new
    new.__dict__.update(copy.deepcopy(x.__dict__, memo))
    if x.grad is not None:
        new.grad = copy.deepcopy(x.grad, memo)
    return new
