"""Judges whether a convolution's result is as near to the exact one as its sizes and its dtype allow.

Two results are compared element by element. The elements in which they differ, and a sample of the others that contains
the corners of the result and of its parts, are computed in float64: this shows which of the two results is wrong. No
whole tensor is converted to float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import numpy as np
import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Role, Shape

ROUNDINGS, STEPS = 3.0, 16.0
"""Roundings of the result's type that an element may be off by, in units of its own size and of its products'; of half
types so many times more as is the root of the number of sums that a kernel may round on its way, divided by `STEPS`."""

SUMMING = 4.0
"""Roundings of the type that is added up in that an element may be off by, times the root of the number of products, in
units of the sum of their sizes."""

SAMPLE, PRODUCTS, LEAST = 24, 1 << 22, 4
"""Elements that are computed in float64: so many, or fewer where these have more products, but not below the least."""

SUSPECTS = 8
"""The number of elements that are computed in float64 because they differ most, and of random ones that differ."""

AT_ONCE = 1 << 20
"""Elements that are compared at once, if a sample does not have more, since their differences take memory."""

INPUT_ROUNDINGS = {"tf32": 2.0**-10, "bf16": 2.0**-7}
"""The rounding of float32 numbers, where a device's switches let them be multiplied in a narrower type."""


class Fault(NamedTuple):
    """An element that is off.

    Attributes:
        place: its indices.
        found, right: what was computed, and in float64.
        allowed: how far from the right one it may be.
    """

    place: Shape
    found: float
    right: float
    allowed: float

    def __str__(self) -> str:
        return (
            f"{self.found:.6g} at {list(self.place)} in place of {self.right:.6g}, where {self.allowed:.2g} is allowed"
        )


@dataclass(frozen=True)
class Bound:
    """The tolerance of an element: how far it may be from its exact value."""

    dtype: torch.dtype  # Of the result.
    precision: str  # What `Device.precision` says.
    count: int  # Products of an element.
    sums: int  # That a kernel of half types may round on its way to an element: one per sample, or one per tap.
    peak: float  # The largest product that there may be.

    def __call__(self, value: float, size: float, root: float) -> float:
        """The bound of one element, from its value, the sum of the sizes of its products, and their root sum square."""
        kind = torch.finfo(self.dtype)
        summed = torch.finfo(torch.float64 if self.dtype == torch.float64 else torch.float32)
        unit = kind.eps
        if self.dtype == torch.float32:
            unit = max([unit, *(step for name, step in INPUT_ROUNDINGS.items() if name in self.precision)])
        roundings = ROUNDINGS * (1 + math.sqrt(self.sums) / STEPS if kind.bits == 16 else 1)
        summing = SUMMING * summed.eps * math.sqrt(self.count) * max(size, self.peak)
        least = 4 * kind.smallest_normal * kind.eps + self.count * summed.smallest_normal
        return roundings * unit * (abs(value) + root) + summing + least


def verdict(
    problem: ConvProblem,
    operands: Operands,
    result: torch.Tensor,
    other: torch.Tensor | None,
    precision: str,
    seams: Iterable[tuple[int, int]] = (),
    sample: int = SAMPLE,
) -> tuple[Fault | None, Fault | None] | None:
    """The worst fault of a result, and that of another one; `None` where the operands are not finite.

    Args:
        operands: what both were computed from.
        other: what another algorithm computed; without it only a sample is looked at.
        precision: what `Device.precision` says.
        seams: the boundaries between parts of the result, as (tensor dim, index of the first element behind).
        sample: elements that are looked at in any case, at most.
    """
    peak = math.prod(_largest(getattr(operands, role)) for role in Role if role is not problem.target)
    if not math.isfinite(peak):
        return None
    sums = problem.extent if problem.target is Role.W else math.prod(problem.w_shape[2:])
    bound = Bound(result.dtype, precision, terms(problem), sums, peak)
    count = max(LEAST, min(sample, PRODUCTS // bound.count))
    places = list(dict.fromkeys(_sample(problem, count, tuple(seams))))
    known = exact(problem, operands, places)
    if other is not None:
        size, root = (max(one[column] for one in known) for column in (1, 2))
        suspects = [place for place in _suspects(result, other, bound(0.0, size, root)) if place not in places]
        if suspects:
            places += suspects
            known += exact(problem, operands, suspects)
    return _worst(result, places, known, bound), None if other is None else _worst(other, places, known, bound)


def _worst(
    result: torch.Tensor, places: list[Shape], known: list[tuple[float, float, float]], bound: Bound
) -> Fault | None:
    indices = torch.tensor(places, device=result.device).unbind(1)
    faults = []
    most = torch.finfo(result.dtype).max
    for place, found, one in zip(places, result[indices].double().tolist(), known, strict=True):
        allowed = bound(*one)
        # Numbers that the dtype cannot represent may become anything.
        if abs(one[0]) + allowed < most and not abs(found - one[0]) <= allowed:
            faults.append(Fault(place, found, one[0], allowed))
    return max(faults, key=_excess, default=None)


def _excess(fault: Fault) -> float:
    off = abs(fault.found - fault.right)
    return off / fault.allowed if math.isfinite(off) else math.inf


def _largest(tensor: torch.Tensor) -> float:
    least, most = torch.aminmax(tensor)
    return float(torch.maximum(least.abs(), most.abs()))


def _suspects(result: torch.Tensor, other: torch.Tensor, allowed: float) -> list[Shape]:
    """Places where two results differ by more than half of the tolerance: the worst, and some of the others.

    Where sums are small, less is allowed than where they are large, so what differs little may be wrong, too.
    """
    unit = ROUNDINGS / 2 * torch.finfo(result.dtype).eps
    found: list[tuple[float, Shape]] = []
    rest: list[Shape] = []
    samples = max(1, AT_ONCE * len(result) // result.numel())
    for number, (mine, theirs) in enumerate(zip(result.split(samples), other.split(samples), strict=True)):
        off = (mine.to(torch.promote_types(mine.dtype, torch.float32)) - theirs).abs_()
        near = off <= theirs.abs() * unit + allowed / 2
        if bool(near.all()):
            continue
        off.masked_fill_(near | (mine == theirs) | (mine.isnan() & theirs.isnan()), 0.0).nan_to_num_(math.inf)
        flat = off.flatten()
        worst = flat.topk(min(SUSPECTS, flat.numel()))
        pairs = zip(worst.values.tolist(), worst.indices.tolist(), strict=True)
        found += [(value, _place(place, number * samples, mine)) for value, place in pairs]
        differ = flat.nonzero()
        if len(differ):
            picked = differ[:: max(1, len(differ) // SUSPECTS)].flatten().tolist()
            rest += [_place(place, number * samples, mine) for place in picked]
    worst_first = [place for value, place in sorted(found, key=lambda one: -one[0]) if value > 0]
    some = rest[:: max(1, len(rest) // SUSPECTS)][:SUSPECTS]
    return list(dict.fromkeys([*worst_first[:SUSPECTS], *some]))


def _place(flat: int, start: int, part: torch.Tensor) -> Shape:
    first, *rest = map(int, np.unravel_index(flat, part.shape))
    return start + first, *rest


def _sample(problem: ConvProblem, count: int, seams: tuple[tuple[int, int], ...]) -> Iterator[Shape]:
    """Corners of the result and of its parts, and drawn places; the same every time."""
    random, shape = Random(str(problem)), problem.target_shape
    for number in range(count):
        place = [random.randrange(extent) for extent in shape]
        for dim, extent in enumerate(shape):
            at_edge = number < 2 or (number % 3 and random.random() < 0.5)
            if at_edge and dim != 1:
                place[dim] = 0 if (number == 0 or (number > 1 and random.random() < 0.5)) else extent - 1
        if seams and number % 3 == 2:
            dim, behind = random.choice(seams)
            place[dim] = behind - random.randrange(2)
        yield tuple(place)


def exact(problem: ConvProblem, operands: Operands, places: Sequence[Shape]) -> list[tuple[float, float, float]]:
    """The target's elements at some places: the value, the sum of the sizes of its products, and their root sum square.

    ``operands``: what is read; the target is not.
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
