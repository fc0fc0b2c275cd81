"""The arguments that torch passes to a convolution, its tensors, and the problem that they define."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mucudnn.convolution.problem import DTYPE_BYTES, ConvProblem, Direction, Shape


@dataclass(slots=True, eq=False)
class Call:
    """The arguments of `aten::convolution` or of one direction of `aten::convolution_backward`; they are not changed.
    A frozen dataclass would take three times as long to make, at every call."""

    direction: Direction
    input: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None  # None in the backward directions.
    grad_output: torch.Tensor | None  # None in the forward direction.
    stride: Shape
    padding: Shape
    dilation: Shape
    transposed: bool
    output_padding: Shape
    groups: int
    before: Callable[[], None] | None = None
    """What torch would compute before this direction and has not yet, the gradient of the input before that of the
    weight; called before the result is allocated where memory is counted in torch's order."""
    by_torch: Callable[[], torch.Tensor] | None = None
    """Computes the call as torch would, with whatever torch computes along with it; None where that is nothing."""

    @property
    def geometry(self) -> tuple[Shape, Shape, Shape, bool, Shape, int]:
        """(stride, padding, dilation, transposed, output_padding, groups), as `aten::convolution` takes them."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    @property
    def kind(self) -> tuple[Any, ...]:
        """The direction, the shapes of input and weight, and the geometry: equal for calls of equal layers."""
        return self.direction, tuple(self.input.shape), tuple(self.weight.shape), self.geometry

    def operands(self, target: torch.Tensor | None = None) -> Operands:
        """The tensors by their roles, the direction's target among them if there is one yet."""
        source, w, output = self.input, self.weight, self.grad_output
        if target is not None:
            if self.direction is Direction.FORWARD:
                output = target
            elif self.direction is Direction.BACKWARD_DATA:
                source = target
            else:
                w = target
        x, y = (output, source) if self.transposed else (source, output)
        return Operands(x, w, y, self.bias)  # type: ignore[arg-type]

    def problem(self, result: torch.Tensor | None = None) -> ConvProblem | None:
        """The problem that is solved, None for one that mucudnn does not divide.

        ``result``: what torch's own kernel returns, for its memory format.
        """
        operands = self.operands(result)
        tensors = [tensor for tensor in (operands.x, operands.w, operands.y) if tensor is not None]
        dtype = str(self.input.dtype).removeprefix("torch.")
        uniform = len({(t.dtype, t.device, t.layout, t.dim()) for t in tensors}) == 1
        if not uniform or dtype not in DTYPE_BYTES or self.input.layout != torch.strided or self.input.dim() > 5:
            return None
        try:
            problem = ConvProblem.of_convolution(
                self.direction,
                tuple(self.input.shape),
                tuple(self.weight.shape),
                stride=self.stride,
                padding=self.padding,
                dilation=self.dilation,
                groups=self.groups,
                transposed=self.transposed,
                output_padding=self.output_padding,
                dtype=dtype,
                formats=tuple("" if t is None else format_name(t) for t in (operands.x, operands.w, operands.y)),  # type: ignore[arg-type]
            )
        except ValueError:
            return None
        if self.grad_output is not None and tuple(self.grad_output.shape) != problem.output_shape:
            return None
        return problem

    def is_for_cudnn(self) -> bool:
        """Whether torch would give the call to cuDNN; what it gives to kernels of its own stays with them."""
        backend = torch._C._select_conv_backend(self.input, self.weight, self.bias, *self.geometry)
        return backend.name in ("Cudnn", "CudnnTranspose")


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""The channels-last memory formats by the number of dims."""


def torch_format(name: str, dims: int) -> torch.memory_format:
    """Torch's own of the memory format "contiguous" or "channels_last"."""
    return _CHANNELS_LAST[dims] if name == "channels_last" else torch.contiguous_format


def format_name(tensor: torch.Tensor) -> str:
    """ "contiguous", "channels_last", or "strided" for any other."""
    if tensor.is_contiguous():
        return "contiguous"
    last = _CHANNELS_LAST.get(tensor.dim())
    return "channels_last" if last is not None and tensor.is_contiguous(memory_format=last) else "strided"


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
