"""Whether torch's autocast converts the operands of operators on a device."""

from __future__ import annotations

import torch


def converts_operands(device: torch.device) -> bool:
    """Whether autocast is on there; never for meta tensors, by which steps are predicted, as it does not know them."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
