"""Elements: computes single elements of a convolution's result in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mucudnn.convolution.operands import Operands
from mucudnn.convolution.problem import ConvProblem, Role, Shape


def exact(problem: ConvProblem, operands: Operands, places: Sequence[Shape]) -> list[tuple[float, float, float]]:
    """The target's elements at some places: the value, the sum of the sizes of its products, and their root sum square.

    Args:
        operands: what is read; the target is not.
    """
    found = []
    for place in places:
        one, other = (tensor.double().flatten() for tensor in _factors(problem, operands, place))
        products = one * other
        if operands.bias is not None:
            products = torch.cat([products, operands.bias[place[1]].double().view(1)])
        found.append(torch.stack([products.sum(), products.abs().sum(), products.norm()]))
    return [(value, size, root) for value, size, root in torch.stack(found).tolist()]


def terms(problem: ConvProblem) -> int:
    """Products that an element of the target is the sum of, at most."""
    taps = math.prod(problem.w_shape[2:])
    if problem.target is Role.W:
        return problem.extent * math.prod(problem.y_shape[2:])
    return taps * (problem.w_shape[1] if problem.target is Role.Y else problem.w_shape[0] // problem.groups)


def _factors(problem: ConvProblem, operands: Operands, place: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    """What is multiplied for one element, element by element, as views."""
    x, w, y = operands.x, operands.w, operands.y
    channels, filters = problem.w_shape[1], problem.w_shape[0] // problem.groups
    first, second, *inner = place
    cuts = [_cuts(problem, dim, at) for dim, at in enumerate(inner)]
    reads, takes, makes = zip(*cuts, strict=True)
    if problem.target is Role.Y:
        group = second // filters * channels
        return x[(first, slice(group, group + channels), *reads)], w[(second, slice(None), *takes)]
    if problem.target is Role.X:
        group = second // channels * filters
        part = slice(group, group + filters)
        # As the taps ascend, the outputs that they belong to descend.
        back = tuple(range(1, 1 + len(inner)))
        return y[(first, part, *makes)].flip(back), w[(part, second % channels, *takes)]
    channel = first // filters * channels + second
    return x[(slice(None), channel, *reads)], y[(slice(None), first, *makes)]


def _cuts(problem: ConvProblem, dim: int, at: int) -> tuple[slice, slice, slice]:
    """Along a spatial dim, the inputs, taps and outputs that the target's place has to do with."""
    window, inputs, outputs = problem.windows[dim], problem.x_shape[2 + dim], problem.y_shape[2 + dim]
    s, p, d, k = window.stride, window.padding, window.dilation, window.kernel
    if problem.target is Role.Y:
        found = [(at * s - p + d * t, t, at) for t in range(k)]
    elif problem.target is Role.X:
        found = [(at, t, (at + p - d * t) // s) for t in range(k) if (at + p - d * t) % s == 0]
    else:
        found = [(o * s - p + d * at, at, o) for o in range(outputs)]
    found = [one for one in found if 0 <= one[0] < inputs and 0 <= one[2] < outputs]
    x, w, y = (_slice(list(indices)) for indices in zip(*found, strict=True)) if found else (slice(0),) * 3
    return x, w, y


def _slice(indices: list[int]) -> slice:
    """What takes the indices, which are evenly spaced, in ascending order."""
    step = abs(indices[1] - indices[0]) if len(indices) > 1 else 1
    return slice(min(indices), max(indices) + 1, step or 1)
