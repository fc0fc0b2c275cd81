"""The interface between the planner and those who compute convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from mucudnn.problem import ConvProblem

if TYPE_CHECKING:
    from mucudnn.tile import Tile


@dataclass(frozen=True, slots=True)
class Operands:
    """The tensors of one convolution, two to read and the problem's target to write.

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


class Part:
    """A convolution and its tensors: a micro-batch or a micro-tile of a larger one, or the whole of it.

    Attributes:
        problem: the convolution.
        whole: the tensors of the larger one.
        kept: what a provider made ready for this part; it lives as long as the plan, and serves all its calls.
    """

    __slots__ = ("_operands", "_tile", "kept", "problem", "whole")

    def __init__(self, tile: Tile, whole: Operands) -> None:
        self.problem = tile.problem
        self.whole = whole
        self.kept = tile.kept
        self._tile = tile
        self._operands: Operands | None = None

    @property
    def operands(self) -> Operands:
        """Views of the whole's tensors; the weight is shared."""
        if self._operands is None:
            self._operands = self._tile.cut(self.whole)
        return self._operands

    @property
    def target(self) -> torch.Tensor:
        """The tensor to be written."""
        return self.operands.target(self.problem)

    def addresses(self) -> tuple[int, int, int]:
        """Of x, w and y, found faster than the views are made."""
        return self._tile.addresses(self.whole)


class Provider(Protocol):
    """A source of convolution algorithms."""

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        """The names of the algorithms that compute this problem; each name belongs to one provider.

        The padding of the problem need not be the same at both ends (`ConvProblem.padding_after`).
        """
        ...

    def serves(self, problem: ConvProblem, algorithm: str) -> bool:
        """Whether one of the algorithms computes this problem, be it among its `algorithms` or not."""
        ...

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        """Bytes that a launch of the problem holds at its peak beyond operands and target."""
        ...

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        """Runs one algorithm on parts of one convolution, one after the other, writing their targets.

        Args:
            algorithm: one of `algorithms(problem)` of every part.
            parts: with one weight in common, and one target where that is the weight; they differ in their extents
                along one dim and in the padding along it. What they share (a transformed weight) may be kept between
                them, so long as the peak stays within the largest `workspace` of a part.
            accumulate: whether to add to a target weight rather than overwrite it. Sums over the parts themselves are
                the algorithm's own business; outputs and data gradients are always overwritten.

        Raises:
            RuntimeError: where the algorithm cannot run after all; the target's contents are then undefined.
        """
        ...


def compute_dtype(problem: ConvProblem) -> torch.dtype:
    """The type host algorithms compute in: half types are widened to float32."""
    return torch.float64 if problem.dtype == "float64" else torch.float32
