"""The interface between the planner and the providers, which compute convolutions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem
from mucudnn.convolution.tile import Part, Tile
from mucudnn.devices.speeds import LARGE


class Effort(NamedTuple):
    """The least that computing something takes."""

    operations: float = 0.0  # Floating-point operations, in products of matrices and transforms.
    written: float = 0.0  # Bytes that go to scratch tensors.
    fresh: float = 0.0  # Of these, bytes of tensors so large that the system gives them fresh pages each time.

    @classmethod
    def of(cls, operations: float, *tensors: int, times: int = 1) -> Effort:
        """Operations, and scratch tensors by their bytes, so many times."""
        fresh = sum(size for size in tensors if size >= LARGE)
        return cls(times * operations, times * sum(tensors), times * fresh)

    def plus(self, other: Effort) -> Effort:
        return Effort(*map(operator.add, self, other))


class Provider:
    """A source of convolution algorithms."""

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        """The names of the algorithms that compute this problem; each name belongs to one provider.

        Where it is costly to find out, as on a GPU, some of them may not compute it: `serves` says so.

        The padding of the problem need not be the same at both ends (`ConvProblem.padding_after`).
        """
        raise NotImplementedError

    def serves(self, problem: ConvProblem, algorithm: str) -> bool:
        """Whether one of the algorithms computes this problem, be it among its `algorithms` or not."""
        return algorithm in self.algorithms(problem)

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        """The peak of the bytes that a launch of the problem allocates beyond operands and target."""
        raise NotImplementedError

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
        raise NotImplementedError

    def effort(self, problem: ConvProblem, algorithm: str, count: int = 1) -> Effort | None:
        """The least work of a launch of so many parts like the problem, so that hopeless ones are not tried; `None`
        where it is unknown."""
        return None

    def ready(self, algorithm: str, tiles: Sequence[Tile], accumulate: bool) -> Callable[[Operands], bool] | None:
        """A `launch` for tiles of any whole's operands, where it can be prepared; what takes long is left to its first
        call. It returns whether it did compute the parts: `launch` serves any operands."""
        return None


class Archive(Protocol):
    """Keeps the plans of engines that cuDNN compiles at run time, so that later runs need not compile them again."""

    def compiled_plan(self, problem: ConvProblem, launch: str) -> str | None:
        """The text of a plan, `None` where none is kept."""

    def keep_compiled_plan(self, problem: ConvProblem, launch: str, text: str) -> None: ...


def compute_dtype(problem: ConvProblem) -> torch.dtype:
    """The type host algorithms compute in: half types are widened to float32."""
    return torch.float64 if problem.dtype == "float64" else torch.float32
