"""Computes the input interval that an output interval needs, along one spatial dim.

Intervals are half-open pairs ``(start, stop)`` of global positions, ``(0, 0)`` when empty. They are *unclipped*:
positions below 0 or past the extent are the padding. With stride s, padding p before the first element, dilation d and
kernel k, output o of a convolution or pooling window reads the inputs ``o*s - p + d*j`` for j in [0, k); a transposed
convolution turns the arrow round.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

Interval = tuple[int, int]

EMPTY: Interval = (0, 0)


def length(interval: Interval) -> int:
    """Number of positions in the interval."""
    return max(0, interval[1] - interval[0])


def intersect(a: Interval, b: Interval) -> Interval:
    """The positions in both intervals, ``EMPTY`` if there is none."""
    start, stop = max(a[0], b[0]), min(a[1], b[1])
    return (start, stop) if start < stop else EMPTY


@dataclass(frozen=True)
class Window:
    """The geometry of a convolution or pooling window along one dim.

    ``padding`` is that before the first input; the padding after the last one follows from the requested output extent.
    """

    kernel: int
    stride: int = 1
    padding: int = 0
    dilation: int = 1

    @cached_property
    def reach(self) -> int:
        """Inputs spanned by one output: dilation * (kernel - 1) + 1."""
        return self.dilation * (self.kernel - 1) + 1

    def outputs(self, extent: int) -> int:
        """Output extent of a convolution over ``extent`` inputs with as much padding after the last one."""
        return max(0, (extent + 2 * self.padding - self.reach) // self.stride + 1)

    def transposed_outputs(self, extent: int, output_padding: int = 0) -> int:
        """Output extent of a transposed convolution over ``extent`` inputs."""
        return (extent - 1) * self.stride - 2 * self.padding + self.reach + output_padding

    def inputs(self, outputs: Interval) -> Interval:
        """The inputs that outputs [a, b) read: [a*s - p, (b-1)*s - p + d*(k-1) + 1)."""
        start, stop = outputs
        if start >= stop:
            return EMPTY
        return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + self.reach

    def readers(self, inputs: Interval) -> Interval:
        """The outputs whose window spans some of the inputs [a, b): what makes [a, b) in a transposed convolution.

        The hull: with a dilation, an output inside may in fact touch none of them. Empty where the stride steps over
        them all.
        """
        start, stop = inputs
        if start >= stop:
            return EMPTY
        first = -((self.reach - 1 - self.padding - start) // self.stride)
        last = (stop - 1 + self.padding) // self.stride
        return (first, last + 1) if first <= last else EMPTY

    def transposed(self, outputs: Interval) -> Transposed:
        """The arguments of one local call that computes the outputs [a, b) of a transposed convolution."""
        start, stop = outputs
        if start >= stop:
            return Transposed(EMPTY, EMPTY, 0, 0)
        need = self.readers(outputs)
        # Zeros beyond `need` let one call cover [a, b) where what its inputs touch does not.
        first = (start + self.padding) // self.stride
        last = -((self.reach - stop - self.padding) // self.stride)
        if need != EMPTY:
            first, last = min(first, need[0]), max(last, need[1] - 1)
        last = max(first, last)
        before = start - (first * self.stride - self.padding)
        after = last * self.stride - self.padding + self.reach - stop
        crop = min(before, after)
        return Transposed(need, (first, last + 1), crop, before - crop)


@dataclass(frozen=True)
class Transposed:
    """A local transposed convolution: read ``span`` (zero outside ``need``), pass ``padding``, drop ``skip``."""

    need: Interval
    span: Interval
    padding: int
    skip: int
