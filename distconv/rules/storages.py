"""The memory behind a distributed tensor, by which libraries find out which tensors of a state share memory."""

from __future__ import annotations

from typing import Any

from torch._guards import TracingContext
from torch.distributed.tensor import DTensor

from distconv.rules.registry import method


@method("untyped_storage")
def untyped_storage(stock_method: Any, x: DTensor) -> Any:
    """That of this rank's shard: two DTensors share it where one process's tensors would."""
    if TracingContext.try_get() is not None:  # torch.compile keeps apart what a tensor and its shard seem to hold
        return stock_method(x)
    return x._local_tensor.untyped_storage()
