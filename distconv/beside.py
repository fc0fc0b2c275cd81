"""Plain tensors beside distributed ones, as an operator gets them: made plain where they are of a subclass, and shown to
whom it concerns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

watchers: list[Callable[[Any, int, Tensor, DeviceMesh], None]] = []
"""Each is called with (operator, number of the argument, tensor, mesh) for a plain tensor beside a DTensor on a mesh."""


def plain(x: Tensor) -> Tensor:
    """The same tensor without its subclass, where that only adds data and methods, as MONAI's MetaTensor and
    torchvision's images and masks do. DTensors, parameters and tensors with a dispatch of their own stay.
    """
    kind = type(x)
    if kind is Tensor or kind is DTensor or kind is nn.Parameter:
        return x
    if isinstance(x, nn.Parameter) or getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)
