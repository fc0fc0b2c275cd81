"""Computes the gradients of one call of `aten::convolution_backward`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mucudnn.convolution.call import Call, format_name, torch_format
from mucudnn.convolution.problem import Direction
from mucudnn.runtime.session import Session

_BIAS_SUMS = {dims: (0, *range(2, dims)) for dims in range(2, 6)}
"""The dims of an output over which the gradient of a bias is summed, by their number."""


def in_memory_format(grad_output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """A gradient in the memory format of the input: one copy for both directions, as in torch's own kernel of a GPU."""
    if format_name(grad_output) != "strided":
        return grad_output
    return grad_output.contiguous(memory_format=torch_format(format_name(input), input.dim()))


class Gradients:
    """The gradients of one call of `aten::convolution_backward`: some by decisions, the others by torch at once."""

    __slots__ = ("_arguments", "_found", "_left", "_stock")

    def __init__(self, stock: Callable[..., Any], arguments: tuple[Any, ...], mask: Sequence[bool]) -> None:
        """
        Args:
            stock: torch's own kernel, and its arguments but for the mask.
            mask: which gradients are asked for.
        """
        self._stock, self._arguments = stock, arguments
        self._left = list(mask)
        self._found: list[torch.Tensor | None] = [None, None, None]

    def found(self, session: Session, data: Any, filter: Any, looks: tuple[Any, ...]) -> Sequence[torch.Tensor | None]:
        """The gradients of input, weight and bias that are asked for.

        Args:
            data, filter: the decisions on the gradients of input and weight: `UNDECIDED` for one that is made now,
                `None` where torch computes the gradient.
            looks: the shapes, strides and types by which the session keeps decisions.
        """
        found, left = self._found, self._left
        grad_output, input, weight, _, *geometry = self._arguments
        arguments = input, weight, None, grad_output, *geometry
        if data is not None:
            call = Call(Direction.BACKWARD_DATA, *arguments)
            found[0] = session.result(data, (call.direction, looks), call)
            left[0] = found[0] is None
        if filter is not None:
            before = self._input_gradient if left[0] else None
            call = Call(Direction.BACKWARD_FILTER, *(*arguments, before, self._weight_gradient))
            found[1] = session.result(filter, (call.direction, looks), call)
            left[1] = found[1] is None
        if left[2] and not left[1] and (found[0] is not None or found[1] is not None):
            # Torch would compute the weight's gradient once more to get that of the bias, which is a mere sum.
            found[2], left[2] = grad_output.sum(_BIAS_SUMS[grad_output.dim()]), False
        if True in left:
            rest = self._by_torch(left)
            found[:] = [new if is_left else known for new, is_left, known in zip(rest, left, found, strict=True)]
        return tuple(found)

    def _by_torch(self, mask: Sequence[bool]) -> Sequence[torch.Tensor | None]:
        every: Sequence[torch.Tensor | None] = self._stock(*self._arguments, mask)
        return every

    def _input_gradient(self) -> None:
        # Torch computes it before the weight's gradient, which is not alive yet then. The other way round the peak of
        # memory would be higher than in the step that was recorded.
        self._found[0], self._left[0] = self._by_torch([True, False, False])[0], False

    def _weight_gradient(self) -> torch.Tensor:
        # With that of the bias, as ever: without it oneDNN would have to make another kernel ready.
        _, weight, bias = self._by_torch([False, True, self._left[2]])
        if self._left[2]:
            self._found[2], self._left[2] = bias, False
        assert weight is not None, "it was asked for"
        return weight
