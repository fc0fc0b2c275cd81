"""Whether torch's autocast converts the operands of operators."""

from __future__ import annotations

import torch
from torch import Tensor


def converts_operands(x: Tensor) -> bool:
    """Whether autocast is on where a tensor is; never for meta tensors, by which steps are predicted."""
    if not torch._C._is_any_autocast_enabled():  # soonest: the device of an activation takes several calls
        return False
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)
