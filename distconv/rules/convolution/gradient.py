"""The gradients of a convolution as functions that autograd records, for gradients of gradients.

A convolution is linear in its input x and in its weight w. So the derivatives of its backward are again convolutions
and backwards of convolutions, whose tensors lie as those of the layer do. Torch's formula would convolve x with g, the
gradient, as if g were a weight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.rules.registry import above_autograd

aten = torch.ops.aten


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, g: Tensor, x: Tensor, w: Tensor, filters: Any, arguments: Any, mask: Any) -> Any:
        ctx.save_for_backward(g, x, w)
        ctx.given = arguments
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            return aten.convolution_backward.default(g, x, w, filters, *arguments, mask)

    @staticmethod
    def backward(ctx: Any, for_x: Tensor | None, for_w: Tensor | None, for_bias: Tensor | None) -> tuple[Any, ...]:
        g, x, w = ctx.saved_tensors
        need_g, need_x, need_w = ctx.needs_input_grad[:3]

        def gradient(x: Tensor, w: Tensor, index: int) -> Tensor:
            mask = [at == index for at in range(3)]
            found: Tensor = aten.convolution_backward.default(g, x, w, None, *ctx.given, mask)[index]
            return found

        parts = []
        if need_g:
            if for_x is not None:
                parts.append(aten.convolution.default(for_x, w, None, *ctx.given))
            if for_w is not None:
                parts.append(aten.convolution.default(x, for_w, None, *ctx.given))
            if for_bias is not None:
                parts.append(for_bias.view(-1, *[1] * (g.dim() - 2)).expand_as(g))
        dg = sum(parts[1:], parts[0]) if parts else None
        dx = gradient(x, for_w, 0) if need_x and for_w is not None else None
        dw = gradient(for_x, w, 1) if need_w and for_x is not None else None
        return dg, dx, dw, None, None, None


@above_autograd("aten::convolution_backward")
def convolution_backward(g: Tensor, x: Tensor, w: Tensor, filters: Any, *rest: Any) -> Any:
    """dL/dx, dL/dweight and dL/dbias of a convolution. Differentiable."""
    *arguments, mask = rest
    return _Gradients.apply(g, x, w, filters, arguments, mask)
