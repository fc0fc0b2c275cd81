"""Operands of convolution problems, an independent reference, and how far from it results may be."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Direction, Role

CONVOLUTIONS = {1: functional.conv1d, 2: functional.conv2d, 3: functional.conv3d}
TRANSPOSED = {1: functional.conv_transpose1d, 2: functional.conv_transpose2d, 3: functional.conv_transpose3d}


def apply(problem: ConvProblem, source: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """The caller's convolution through torch's public functions."""
    arguments: dict[str, Any] = {"stride": problem.stride, "padding": problem.padding, "dilation": problem.dilation}
    if problem.transposed:
        arguments["output_padding"] = problem.output_padding
        return TRANSPOSED[problem.dims](source, w, bias, groups=problem.groups, **arguments)
    return CONVOLUTIONS[problem.dims](source, w, bias, groups=problem.groups, **arguments)


def operands(problem: ConvProblem, seed: int = 0, with_bias: bool = False) -> Operands:
    """Random operands; the target is poisoned with NaN."""
    generator = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, problem.dtype)

    def random(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    tensors = {role: random(getattr(problem, f"{role}_shape")) for role in Role}
    tensors[problem.target] = torch.full_like(tensors[problem.target], math.nan)
    bias = random(problem.output_shape[1:2]) if with_bias else None
    return Operands(**{str(role): tensor for role, tensor in tensors.items()}, bias=bias)


def reference(problem: ConvProblem, given: Operands) -> torch.Tensor:
    """The target in float64 by stock torch: autograd of the public functions."""
    wide = {role: getattr(given, role).double() for role in Role}
    bias = None if given.bias is None else given.bias.double()
    source_role, produced_role = (Role.Y, Role.X) if problem.transposed else (Role.X, Role.Y)
    if problem.direction is Direction.FORWARD:
        return apply(problem, wide[source_role], wide[Role.W], bias)
    wanted = Role.W if problem.direction is Direction.BACKWARD_FILTER else source_role
    wide[wanted] = torch.zeros_like(wide[wanted], requires_grad=True)
    output = apply(problem, wide[source_role], wide[Role.W], None)
    return torch.autograd.grad(output, wide[wanted], wide[produced_role])[0]


def rounding_error(problem: ConvProblem, given: Operands) -> float:
    """Norm-wise distance of the target from the reference, relative to the sums of absolute products.

    The terms of a sum may cancel; what rounding leaves of them is measured by their sizes.
    """
    sizes = Operands(given.x.abs(), given.w.abs(), given.y.abs(), None if given.bias is None else given.bias.abs())
    scale = reference(problem, sizes).norm().item()
    return (given.target(problem).double() - reference(problem, given)).norm().item() / (scale or 1.0)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm-wise: |actual - expected| / |expected|, NaN where actual is."""
    scale = expected.double().norm().item()
    return (actual.double() - expected.double()).norm().item() / (scale or 1.0)


TOLERANCE = {"float64": 1e-12, "float32": 4e-6, "bfloat16": 8e-3, "float16": 1e-3}
"""Bounds on `relative_error`: a few units of each type's rounding."""


def dtypes(algorithm: str, *wanted: str) -> tuple[str, ...]:
    """The types to test an algorithm in: torch's own kernels in float64 alone.

    In others it has kernels (oneDNN's, seen with torch 2.13) that are wrong or write beyond their memory for some of
    the `problems`: kernels that reach across the whole image, strided ones with a single output.
    """
    return ("float64",) if algorithm == "stock" else wanted
