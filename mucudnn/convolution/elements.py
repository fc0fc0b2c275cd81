"""Computes single elements of a convolution's result in float64."""

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
    """The factors of one element's sum of products, as two views of the same shape."""
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
    # Each of the three as (index of the first product, step to the next), before the edges are cut off.
    if problem.target is Role.Y:
        x, w, y = (at * s - p, d), (0, 1), (at, 0)
        there = _inside(*x, k, inputs)
    elif problem.target is Role.X:
        step = s // math.gcd(s, d)
        first = next((t for t in range(min(k, step)) if (at + p - d * t) % s == 0), k)
        x, w, y = (at, 0), (first, step), ((at + p - d * first) // s, -d * step // s)
        there = _inside(*y, len(range(first, k, step)), outputs)
    else:
        x, w, y = (d * at - p, s), (at, 0), (0, 1)
        there = _inside(*x, outputs, inputs)
    return _slice(*x, there), _slice(*w, there), _slice(*y, there)


def _inside(first: int, step: int, count: int, end: int) -> range:
    """The numbers below `count` with 0 <= first + step * number < end."""
    if step < 0:
        first, step = end - 1 - first, -step
    return range(max(0, -(first // step)), min(count, (end - 1 - first) // step + 1))


def _slice(first: int, step: int, numbers: range) -> slice:
    """The slice of the indices first + step * number, in ascending order."""
    if not numbers:
        return slice(0)
    ends = first + step * numbers[0], first + step * numbers[-1]
    return slice(min(ends), max(ends) + 1, abs(step) or 1)
