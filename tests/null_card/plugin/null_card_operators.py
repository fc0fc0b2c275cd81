"""Which of torch's operators the host computes for the null card, and what stands for those that only cards have."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]

OWN = re.compile(
    r"aten::(convolution|empty|as_strided|view|_reshape_alias|set_|resize|unfold|record_stream|_?pin_memory|is_pinned|is_set_to"
    r"|_local_scalar_dense|_efficientzerotensor|cudnn_|_cudnn_|_use_cudnn|miopen_|_nested|_sparse|_to_sparse"
    r"|_use_miopen|copy_$|_fft_.*_plan|_flash_attention|_efficient_attention|_scaled_dot_product)(?!backward)"
)
"""Memory, views, and what cuDNN does: torch's own kernels of the card serve these here, too."""


def names() -> list[str]:
    """The operators of which torch has a kernel of the card, and one of the host or something that stands for it."""
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    return [name for name in registered if name in REPLACED or (not OWN.match(name) and _has_host_kernel(name))]


def _has_host_kernel(name: str) -> bool:
    return name.startswith("aten::") and torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CPU")


def _convolution(
    x: Any, weight: Any, size: Any, bias: Any, stride: Any, padding: Any, dilation: Any, **_: Any
) -> torch.Tensor:
    """A depthwise convolution."""
    zero = [0] * len(stride)
    return torch.convolution(x, weight, bias, stride, padding, dilation, False, zero, x.shape[1])


def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, epsilon: float
) -> Outputs:
    output, saved_mean, saved_inverse = torch.native_batch_norm(
        x, weight, bias, mean, variance, training, momentum, epsilon
    )
    return output, saved_mean, saved_inverse, torch.empty(0, dtype=torch.uint8)


def _batch_norm_backward(
    x: Any,
    gradient: Any,
    weight: Any,
    mean: Any,
    variance: Any,
    saved_mean: Any,
    saved_inverse: Any,
    epsilon: float,
    _: Any,
) -> tuple[torch.Tensor, ...]:
    found = torch.ops.aten.native_batch_norm_backward.default(
        gradient, x, weight, mean, variance, saved_mean, saved_inverse, True, epsilon, [True, True, True]
    )
    return tuple(found)


REPLACED: dict[str, Callable[..., Any]] = {
    "aten::_conv_depthwise2d": _convolution,
    "aten::conv_depthwise3d": _convolution,
    "aten::cudnn_batch_norm": _batch_norm,
    "aten::cudnn_batch_norm_backward": _batch_norm_backward,
    "aten::_fused_sdp_choice": lambda *_, **__: 0,  # attention is computed by products and a softmax
}
