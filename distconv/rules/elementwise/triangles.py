"""The upper and lower triangles of matrices, such as causal masks: each rank cuts its own rows and columns."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import input_layout, local_box


@rule("aten::triu", "aten::tril")
def triangle(func: Any, x: DTensor, diagonal: int = 0) -> DTensor:
    """Of the last two dims, laid out as x is."""
    mesh, placements = input_layout(func, x)
    if x.dim() < 2:
        raise RuntimeError(f"{func}: a tensor {tuple(x.shape)}; accepted: one of at least two dims")
    *_, (row, _), (column, _) = local_box(mesh, placements, x.shape)
    return wrap(func(x._local_tensor, diagonal + row - column), mesh, placements, x.shape)
