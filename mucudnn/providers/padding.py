"""Padding for torch's kernels, which take the same padding at both ends of a dim.

The ends may differ by what a stride or an output padding leaves over; any other difference becomes rows of x.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch.nn import functional

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Role, Shape


@dataclass(frozen=True)
class Evened:
    """A problem as torch can compute it.

    Attributes:
        problem: the same convolution on an x with some of its padding made rows of its own.
        before, after: those rows at the two ends of each spatial dim.
    """

    problem: ConvProblem
    before: Shape
    after: Shape

    @property
    def is_same(self) -> bool:
        """Whether torch takes the problem as it is."""
        return not any(self.before + self.after)

    def operands(self, operands: Operands) -> Operands:
        """The operands with zeros in place of the padding: x is copied where it is read and has such rows."""
        if self.is_same:
            return operands
        if self.problem.target is Role.X:
            # Read for its shape and type only.
            shape = self.problem.x_shape
            return replace(operands, x=operands.y.as_strided(shape, (0,) * len(shape)))
        ends = [n for pair in zip(reversed(self.before), reversed(self.after), strict=True) for n in pair]
        return replace(operands, x=functional.pad(operands.x, ends))

    def result(self, result: torch.Tensor) -> torch.Tensor:
        """The wanted part of what torch computes, a view."""
        if self.problem.target is Role.X:
            for dim, (before, after) in enumerate(zip(self.before, self.after, strict=True), start=2):
                result = result.narrow(dim, before, result.shape[dim] - before - after)
        return result


@lru_cache(maxsize=4096)
def evened(problem: ConvProblem) -> Evened:
    """The problem with padding that torch takes."""
    before, after = [], []
    for window, start, stop in zip(problem.windows, problem.padding, problem.padding_after, strict=True):
        spare = max(window.stride, window.dilation) if problem.transposed else window.stride
        fits = 0 <= start - stop < spare
        before.append(0 if fits else max(0, start - max(stop, 0)))
        after.append(0 if fits else max(0, stop - start))
    rows = zip(problem.x_shape[2:], before, after, strict=True)
    same = replace(
        problem,
        x_shape=(*problem.x_shape[:2], *(n + b + a for n, b, a in rows)),
        padding=tuple(p - b for p, b in zip(problem.padding, before, strict=True)),
    )
    return Evened(same, tuple(before), tuple(after))
