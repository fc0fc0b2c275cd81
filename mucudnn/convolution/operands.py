"""The tensors of one convolution."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mucudnn.convolution.problem import ConvProblem


@dataclass(slots=True, eq=False)
class Operands:
    """The tensors of one convolution, two to read and the problem's target to write. They are not exchanged later.

    Attributes:
        x, w, y: of the shapes in the problem, on one device, of any strides. A target `w` may be float32 where the
            others are half types: sums over parts are rounded once, by the caller.
        bias: (channels of the target) to add to an output, or None.
    """

    x: torch.Tensor
    w: torch.Tensor
    y: torch.Tensor
    bias: torch.Tensor | None = None

    def target(self, problem: ConvProblem) -> torch.Tensor:
        """The tensor to be written."""
        tensor: torch.Tensor = getattr(self, problem.target)
        return tensor
