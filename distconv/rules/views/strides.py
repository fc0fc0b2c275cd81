"""Views by strides, which refer to the elements in one process's memory: of whole tensors, and of small ones, gathered.

A rank has a whole tensor in memory as one process does, if it is no view of another. Formulas of backward write to such
views of new tensors.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.rules.schemas import named_arguments
from distconv.rules.whole import permit, undone
from distconv.rules.whole.copies import copy_of
from distconv.tensors.dtensors import wrap_strided
from distconv.tensors.layouts import replicated
from distconv.tensors.refusal import refuse
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import added, redistributed_data


@rule("aten::as_strided", "aten::as_strided_copy", "aten::as_strided_scatter")
def strided(func: Any, *args: Any, **kwargs: Any) -> DTensor:
    """Whole on every rank: a view of a whole tensor, and of what was gathered where it is sharded and small."""
    arguments = named_arguments(func, args, kwargs)
    x = arguments["self"]
    if arguments["storage_offset"] and (x._base is not None or x.is_inference()):
        why = "positions in the memory of a tensor that may be a view of another; accepted: no offset"
        raise refuse(func, why, whole_helps=False)
    distributed = [value for value in arguments.values() if isinstance(value, DTensor)]
    permit(func, distributed, "its strides are those of the whole tensor's memory; accepted: slices, select, unfold")
    mesh = distributed[0].device_mesh
    given = {name: _whole(value) if isinstance(value, DTensor) else value for name, value in arguments.items()}
    result = func(**given)
    y = wrap_strided(result, mesh, replicated(mesh), result.shape, result.stride())

    def write(x: DTensor, view: DTensor) -> None:
        own = _whole(x)
        func(**given | {"self": own}).copy_(view._local_tensor)
        x._local_tensor.copy_(local_as(own, mesh, x.placements))

    return copy_of(y, x, write) if isinstance(x, DTensor) and undone(x) else y


def _whole(x: DTensor) -> Tensor:
    """The whole tensor, in memory as one process has it."""
    if not undone(x):
        return added(x)._local_tensor
    whole = redistributed_data(x, x.device_mesh, replicated(x.device_mesh))._local_tensor
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=whole.device).copy_(whole)
