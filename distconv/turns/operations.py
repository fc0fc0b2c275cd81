"""What an operator computes, from the shapes of its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from distconv.turns.shapes_only import fake_tensors
from distconv.turns.work import Work

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators whose operations torch does not count (attention on a processor), with others that have as many."""


def operations_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The operations of an operator that convolves or multiplies matrices, else 0."""
    counted = ATTENTION.get(func.overloadpacket, func.overloadpacket)
    return int(flop_registry[counted](*args, **kwargs, out_val=result)) if counted in flop_registry else 0


def add_work(work: Work, func: Any, args: Any, kwargs: Any, result: Any, makes: bool = True) -> None:
    """Adds the work of an operator; ``makes``: whether its results may have memory of their own."""
    work.operators += 1
    work.operations += operations_of(func, args, kwargs, result)
    if makes or func._schema.is_mutable:
        work.bytes += sum(x.numel() * x.element_size() for x in fake_tensors((args, *kwargs.values(), result)))
