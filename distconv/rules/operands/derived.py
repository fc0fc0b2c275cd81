"""What rules have made of a parameter's local tensor: behind ``parameter.data = other``, backward reads the other one.

A layer saves its weight for backward. In one process it saves the parameter itself, so backward reads what was assigned
to the parameter's `data` since. A rule saves a view of the parameter's local tensor: it is given the new memory here.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import TensorWeakRef

from distconv.rules.whole.copies import follow_changes
from distconv.tensors.refusal import UnsupportedOperation

_NAME = "_distconv_derived"


def derivable(parameter: DTensor) -> DTensor:
    """A parameter's DTensor, of whose local tensor it is noted from now on what rules make of it."""
    setattr(parameter._local_tensor, _NAME, [])
    return parameter


def derived(x: DTensor, local: Tensor) -> Tensor:
    """Notes a view of x's local tensor, or a copy, where x is a parameter's DTensor, and returns it."""
    views: list[Any] | None = getattr(x._local_tensor, _NAME, None)
    if views is not None:
        is_view = local.untyped_storage()._cdata == x._local_tensor.untyped_storage()._cdata
        views.append(TensorWeakRef(local) if is_view else None)
        if not is_view:
            follow_changes(x, local)
    return local


def copied(x: DTensor, copy: Tensor) -> Tensor:
    """Notes a copy of x in another layout, which a rule reads, where x is a parameter's DTensor, and returns it."""
    views: list[Any] | None = getattr(x._local_tensor, _NAME, None)
    if views is not None:
        views.append(None)
        follow_changes(x, copy)
    return copy


def has_copies(local: Tensor) -> bool:
    """Whether a rule reads a copy of a parameter's local tensor, and so not what is written to its memory."""
    return None in getattr(local, _NAME, ())


def rebind(local: Tensor, other: Tensor) -> None:
    """Gives a parameter's local tensor, and the views that rules have made of it, the memory of another tensor.

    ``local``: in the shape and dtype of ``other``.

    Raises:
        UnsupportedOperation: where a rule has read a copy, or a part that has no place in the other's memory.
    """
    for view in getattr(local, _NAME, ()):
        part = None if view is None else view()
        if view is not None and part is None:
            continue  # nothing reads it any more
        if part is None or (part.shape != local.shape and other.stride() != local.stride()):
            raise UnsupportedOperation(
                f"a parameter {tuple(local.shape)} on this rank: its data was replaced after a layer had used it in"
                f" another layout; accepted: before the layer uses it, or in place"
            )
        if part.shape == local.shape:
            part.data = other
        else:
            start = other.storage_offset() + part.storage_offset() - local.storage_offset()
            part.data = other.as_strided(part.shape, part.stride(), start)
    local.data = other
