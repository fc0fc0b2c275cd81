"""Whether torch's autocast converts the operands of operators."""

from __future__ import annotations

import torch
from torch import Tensor


def converts_operands(x: Tensor) -> bool:
    """Whether autocast is on where a tensor is; never for meta tensors, by which steps are predicted."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return False  # soonest: the device of an activation takes several calls
    device = x.device.type
    return device != "meta" and torch.is_autocast_enabled(device)
