"""What torch.save, pickle, joblib and others write of a distributed tensor: the whole tensor, as a plain one.

So a process without distconv can read a file that a job has written, whatever object the tensor is an attribute of.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from distconv.gathering.calls import script_code
from distconv.rules.registry import method
from distconv.rules.whole import whole_value


@method("__reduce_ex__")
def reduced(stock_method: Any, x: DTensor, protocol: int) -> Any:
    """That of the whole tensor, with the attributes that a program has set on this one. All ranks must pickle it."""
    with script_code():  # a file is the script's, even where a hook writes it
        whole = whole_value("pickle", x.detach(), alike=False).clone()
    plain = (
        nn.Parameter(whole, x.requires_grad) if isinstance(x, nn.Parameter) else whole.requires_grad_(x.requires_grad)
    )
    plain.__dict__.update(x.__dict__)
    return plain.__reduce_ex__(protocol)
