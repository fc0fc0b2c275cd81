"""Complex numbers: conjugates, and conversions between complex numbers and pairs of real ones.

In one process a conjugate is a view that conjugates when it is read. A message contains memory as it is, so conjugates
of shards are computed at once.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.rules.whole import whole_or_refused
from distconv.rules.whole.copies import copy_of
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import dim_axes, layout_of


@rule("aten::_conj", "aten::_neg_view")
def conjugate(func: Any, x: DTensor) -> DTensor:
    """The conjugate, or the negative, of every element."""
    local = func(x._local_tensor).resolve_conj().resolve_neg()

    def write(x: DTensor, y: DTensor) -> None:
        x._local_tensor.copy_(func(y._local_tensor))

    return copy_of(wrap(local, *layout_of(x), x.shape), x, write)


@rule("aten::view_as_real")
def pairs(func: Any, x: DTensor) -> DTensor:
    """(...) complex numbers as (..., 2) real ones."""
    return wrap(func(x._local_tensor), *layout_of(x), (*x.shape, 2))


@rule("aten::view_as_complex")
def complexes(func: Any, x: DTensor) -> DTensor:
    """(..., 2) real numbers as (...) complex ones."""
    mesh, placements = layout_of(x)
    if dim_axes(mesh, placements, x.dim() - 1):
        return whole_or_refused(func, (x,), {}, "its last dim, the pairs, is sharded")
    return wrap(func(x._local_tensor), mesh, placements, x.shape[:-1])
