"""dL/dweight with x and dL/dy in each other's place, for a rank with few rows of x beside a filter of large reach.

dL/dweight of filter f, channel c and element k is the sum over positions i of x[c, i] dL/dy[f, i - k], strides being 1.
Torch takes it over the positions of dL/dy, of which a rank with 10 rows and a reach of 73 has 82: x is padded with rows
of zeros to as many. Seen as a convolution of dL/dy whose result is x, it is a sum over 10 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

MOSTLY = 1.5  # Positions with zeros, relative to those without, beyond which places are swapped.


def swapping_pays(shape: Sequence[int], weight: Sequence[int], zeros: Sequence[int], has_columns: bool) -> bool:
    """Whether an x of a shape would be padded with about as many zeros as it has elements, as `constant_pad_nd` takes
    them. ``has_columns``: whether the kernel writes out operands (im2col), which are then to be no more than without.
    """
    space, (filters, channels) = shape[2:], weight[:2]
    padded = (n + before + after for n, before, after in zip(space, zeros[-2::-2], zeros[-1::-2], strict=True))
    own, all_ = math.prod(space), math.prod(padded)
    return all_ > MOSTLY * own and not (has_columns and filters * own > channels * all_)


def swapped(
    grad: Tensor, weight: Sequence[int], padding: Sequence[int], zeros: Sequence[int], dilation: Sequence[int]
) -> tuple[Tensor, list[int]]:
    """dL/dy (samples, filters, space...) as the input of the convolution whose result is x, and the padding of that.

    Args:
        grad: dL/dy of a convolution of stride 1.
        weight: the shape of its weight.
        padding, zeros: those of its call.
    """
    reaches = [d * (k - 1) for d, k in zip(dilation, weight[2:], strict=True)]
    sides = zip(reaches, padding, zeros[-2::-2], zeros[-1::-2], strict=True)
    ends = [(reach - p - before, reach - p - after) for reach, p, before, after in sides]
    common = [max(0, min(each)) for each in ends]
    rest = [end - p for each, p in zip(ends[::-1], common[::-1], strict=True) for end in each]
    return torch.ops.aten.constant_pad_nd.default(grad, rest) if any(rest) else grad.contiguous(), common


def restored(gradient: Tensor) -> Tensor:
    """dL/dweight from that of the swapped convolution, of shape (channels, filters, elements...)."""
    return gradient.transpose(0, 1).flip([*range(2, gradient.dim())]).contiguous()
