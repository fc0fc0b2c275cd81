"""Functions that give a tensor another size in place: to the size that it has, they change nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.tensors.refusal import refuse


@rule("aten::resize_")
def resize_in_place(func: Any, x: DTensor, size: Sequence[int], *, memory_format: Any = None) -> DTensor:
    """x as it is; refused where it would get another size or format."""
    if tuple(size) != tuple(x.shape) or memory_format is not None:
        raise refuse(func, "another size, or a memory format, of a sharded tensor")
    return x


@rule("aten::resize_as_")
def resize_as_in_place(func: Any, x: DTensor, template: Any, *, memory_format: Any = None) -> DTensor:
    """As `resize_in_place`, to the size of another tensor."""
    return resize_in_place(func, x, template.shape, memory_format=memory_format)
