"""The operators into which torch decomposes an attention, for a program that calls one of them directly."""

from __future__ import annotations

from typing import Any

from torch.distributed.tensor import DTensor

from distconv.rules.registry import rule
from distconv.rules.stock import stock
from distconv.tensors.refusal import refuse

BACKENDS = (
    *("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"),
    "fused_attention_overrideable",
)


@rule(*(f"aten::_scaled_dot_product_{name}{way}" for name in BACKENDS for way in ("", "_backward")))
def backend(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An attention by one backend, of whole tensors."""
    shards = [x for x in args if isinstance(x, DTensor) and any(not p.is_replicate() for p in x.placements)]
    if shards:
        raise refuse(
            func,
            f"it attends to a tensor {tuple(shards[0].shape)} laid out as {shards[0].placements}; accepted:"
            f" torch.nn.functional.scaled_dot_product_attention, with the same backend chosen by torch.nn.attention",
        )
    return stock(func, args, kwargs)
