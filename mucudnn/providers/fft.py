"""Convolution by fast Fourier transforms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from mucudnn.convolution.problem import ConvProblem, Role, Shape
from mucudnn.convolution.tile import Part
from mucudnn.providers.provider import Effort, Provider, compute_dtype

FFT = "fft"

SLOWNESS = 3.0
"""An operation of a transform, and a byte that it copies, takes at least so many times as long as one of a matrix
product, or a byte that is only written: 4.2 to 9.2 times in 8 of 10 random layers, on one core."""


class Fft(Provider):
    """Real transforms of x, w and y, and one complex matrix product per frequency.

    With x shifted by the padding, the convolution is the circular correlation y[j] = sum_t x[j + t] w[t] read at every
    stride-th j, w spread out by the dilation. So Y = X · conj(W), and the gradients are X = Y · W and
    W = conj(Y) · X. A transform of length n + p, p the larger of the two ends' paddings, suffices along a dim: the
    padding before the input and the padding after it may be the same zeros, because no two positions that are wanted
    coincide.

    The spectra grow with the batch; that of the weight does not, and is computed once for all parts of a run. Along a
    spatial dim this is the overlap-save method.
    """

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        return (FFT,)

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        lengths = _lengths(problem)
        real = math.prod(lengths)
        spectrum = 2 * math.prod(_half(lengths))
        x, w, y = (math.prod(shape[:2]) for shape in (problem.x_shape, problem.w_shape, problem.y_shape))
        # Per image: the zero-filled copy with its transform, or the transform with its rearranged copy.
        forward = max(real + spectrum, 2 * spectrum)
        inverse = self._inverse_elements(problem, lengths)
        if problem.target is Role.W:
            # The product is summed over the parts before it is transformed back.
            steps = (w * spectrum + x * forward, (w + x) * spectrum + y * forward, (w + x + y) * spectrum, w * inverse)
        else:
            source, target = (x, y) if problem.target is Role.Y else (y, x)
            steps = (
                w * forward,
                w * spectrum + source * forward,
                (w + source + target) * spectrum,
                w * spectrum + target * inverse,
            )
        return compute_dtype(problem).itemsize * max(steps)

    def effort(self, problem: ConvProblem, algorithm: str, count: int = 1) -> Effort:
        lengths = _lengths(problem)
        real, half = math.prod(lengths), math.prod(_half(lengths))
        size, found = compute_dtype(problem).itemsize, Effort()
        for role in Role:
            images = math.prod(getattr(problem, f"{role}_shape")[:2])
            # A transform of real numbers takes half of 5 n log n operations.
            operations = 2.5 * real * math.log2(max(real, 2)) * images
            # The copy with zeros, its spectrum and that in order; of the result its spectrum and what that becomes.
            elements = (2 * half, real) if role is problem.target else (real, 2 * half, 2 * half)
            # The parts have one weight, and one gradient of it.
            times = 1 if role is Role.W else count
            found = found.plus(Effort.of(operations, *(size * images * each for each in elements), times=times))
        # A complex product with its sum takes 8 operations.
        products = 8 * half * problem.extent * problem.y_shape[1] * problem.w_shape[1]
        found = found.plus(Effort.of(products, times=count))
        return Effort(*(SLOWNESS * least for least in found))

    @staticmethod
    def _inverse_elements(problem: ConvProblem, lengths: Shape) -> int:
        """Real numbers in memory per image while it is transformed back."""
        real = math.prod(lengths)
        spectrum = 2 * math.prod(_half(lengths))
        if problem.dims == 1:
            return spectrum + real
        places = zip(lengths[:-1], _places(problem, problem.target)[:-1], strict=True)
        rows = math.prod(len(range(*place.indices(n))) for n, place in places)
        # The spectrum before and after the leading dims' transform; or that, its wanted rows, and their real values.
        return max(2 * spectrum, spectrum + rows * (2 * _half(lengths)[-1] + lengths[-1]))

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        if parts[0].problem.target is Role.W:
            self._backward_filter(parts, accumulate)
            return
        weight, lengths, dtype = None, None, compute_dtype(parts[0].problem)
        for part in parts:
            problem = part.problem
            source = Role.X if problem.target is Role.Y else Role.Y
            # Parts of one length share the weight's transform; at a greater length a part would exceed its workspace.
            if weight is None or lengths != _lengths(problem):
                weight, lengths = None, _lengths(problem)
                weight = _spectrum(problem, lengths, dtype, Role.W, part.w)
                weight = weight.conj_physical_().mT if source is Role.X else weight
            spectrum = [torch.bmm(_spectrum(problem, lengths, dtype, source, getattr(part, source)), weight)]
            images = _images(problem, lengths, problem.target, spectrum)
            if part.bias is not None:
                images += part.bias.view(problem.groups, 1, -1, *(1,) * problem.dims)
            _grouped(problem, problem.target, getattr(part, problem.target)).copy_(images)
            del images

    def _backward_filter(self, parts: Sequence[Part], accumulate: bool) -> None:
        # One length for all parts, whose products are summed before they are transformed back.
        lengths = tuple(map(max, zip(*(_lengths(part.problem) for part in parts), strict=True)))
        total: torch.Tensor | None = None
        dtype = compute_dtype(parts[0].problem)
        for part in parts:
            x = _spectrum(part.problem, lengths, dtype, Role.X, part.x)
            y = _spectrum(part.problem, lengths, dtype, Role.Y, part.y)
            y = y.conj_physical_().mT
            total = torch.bmm(y, x) if total is None else total.baddbmm_(y, x)
            del x, y
        assert total is not None, "a launch has at least one part"
        spectrum = [total]
        del total
        problem = parts[0].problem
        images = _images(problem, lengths, Role.W, spectrum)
        target = _grouped(problem, Role.W, parts[0].w)
        if accumulate:
            target.add_(images)
        else:
            target.copy_(images)


def _half(lengths: Shape) -> Shape:
    """Extents of a real transform's spectrum."""
    return (*lengths[:-1], lengths[-1] // 2 + 1)


@lru_cache(maxsize=4096)
def _places(problem: ConvProblem, role: Role) -> tuple[Any, ...]:
    """The index of the elements of x, w or y among the transform's positions."""
    if role is Role.X:
        return tuple(slice(p, p + n) for p, n in zip(problem.padding, problem.x_shape[2:], strict=True))
    if role is Role.W:
        return tuple(slice(0, window.reach, window.dilation) for window in problem.windows)
    pairs = zip(problem.stride, problem.y_shape[2:], strict=True)
    return tuple(slice(0, (m - 1) * s + 1, s) for s, m in pairs)


def _grouped(problem: ConvProblem, role: Role, images: torch.Tensor) -> torch.Tensor:
    """A view (groups, A, B, *spatial): of w (groups · A, B, *spatial), of x and y (A, groups · B, *spatial)."""
    if role is Role.W:
        return images.unflatten(0, (problem.groups, -1))
    return images.unflatten(1, (problem.groups, -1)).movedim(1, 0)


def _spectrum(
    problem: ConvProblem, lengths: Shape, dtype: torch.dtype, role: Role, images: torch.Tensor
) -> torch.Tensor:
    """The transform of x, w or y as matrices (frequencies · groups, A, B), A and B as in `_grouped`."""
    padded = images.new_zeros((*images.shape[:2], *lengths), dtype=dtype)
    padded[(..., *_places(problem, role))] = images
    transform = torch.fft.rfftn(padded, dim=tuple(range(2, 2 + problem.dims)))
    del padded
    grouped = _grouped(problem, role, transform).flatten(3)
    del transform
    return grouped.permute(3, 0, 1, 2).reshape(-1, *grouped.shape[1:3]).contiguous()


def _images(problem: ConvProblem, lengths: Shape, role: Role, given: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of `_spectrum` at the role's places: (groups, A, B, *spatial).

    Takes the spectrum out of the list, so that the caller has no reference to it and it can be freed half-way.
    """
    spectrum = given.pop()
    grouped = spectrum.view(*lengths[:-1], -1, problem.groups, *spectrum.shape[1:])
    del spectrum
    dims, places = problem.dims, _places(problem, role)
    if dims > 1:
        grouped = torch.fft.ifftn(grouped, dim=tuple(range(dims - 1)))[places[:-1]]
    real = torch.fft.irfft(grouped, n=lengths[-1], dim=dims - 1)[(..., places[-1], *(slice(None),) * 3)]
    return real.movedim(tuple(range(dims)), tuple(range(-dims, 0)))


@lru_cache(maxsize=4096)
def _lengths(problem: ConvProblem) -> Shape:
    """Transform lengths: room for the input with the wider padding of an end, for the kernel and for the output."""
    paddings = map(max, zip(problem.padding, problem.padding_after, strict=True))
    least = (
        max(n + p, window.reach, (m - 1) * window.stride + 1)
        for n, p, m, window in zip(problem.x_shape[2:], paddings, problem.y_shape[2:], problem.windows, strict=True)
    )
    *leading, last = least
    return (*(smooth(n) for n in leading), smooth(last, step=2))


@lru_cache(maxsize=4096)
def smooth(least: int, step: int = 1) -> int:
    """The least fast transform length from `least` on: a multiple of `step` without prime factors above 7."""
    for candidate in itertools.count(-(-least // step) * step, step):
        rest = candidate
        for prime in (2, 3, 5, 7):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return candidate
    raise AssertionError("unreachable: powers of two have no end")
