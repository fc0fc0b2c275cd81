"""The kernels of oneDNN, as a provider for convolutions for which torch does not choose them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Role
from mucudnn.convolution.tile import Part
from mucudnn.providers.provider import Effort, Provider
from mucudnn.providers.stock import BLOCK, evened, stock_result, torchs_backend

ONEDNN = "onednn"

SMALL_BUFFERS = 1 << 17  # Bytes of what oneDNN allocates beside tensors, at most.


class OneDnn(Provider):
    """Torch's oneDNN kernels for convolutions that torch gives to a plain im2col kernel.

    Torch decides by a rule of thumb, which sends small mini-batches with large samples (one volume, a slab of an image)
    to kernels that are several times slower. Tensors in oneDNN's own layout get its kernels whatever their sizes: the
    workspace is that of the copies, and of those that oneDNN reorders into blocks of 16 channels.
    """

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        enabled = torch.backends.mkldnn.is_available() and torch._C._get_mkldnn_enabled()
        if not enabled or problem.dtype != "float32":
            return ()
        even = evened(problem).problem
        return (ONEDNN,) if _is_ordinary(even) and "Mkldnn" not in torchs_backend(even) else ()

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        even = evened(problem)
        x_shape, y_shape = even.problem.x_shape, problem.y_shape
        copies = sum(map(math.prod, (x_shape, y_shape, even.problem.target_shape)))
        x_format, _, y_format = problem.formats
        # An operand in another memory format than oneDNN converts from is copied twice.
        if problem.target is not Role.X and (x_format != "contiguous" or not even.is_same):
            copies += math.prod(x_shape)
        if problem.target is not Role.Y and y_format != "contiguous":
            copies += math.prod(y_shape)
        groups = problem.groups
        channels, filters = (_blocked(n // groups, groups) for n in (x_shape[1], y_shape[1]))
        reordered = problem.extent * (channels * math.prod(x_shape[2:]) + filters * math.prod(y_shape[2:]))
        weights = filters * channels // groups * math.prod(problem.w_shape[2:])
        # Two in blocks, and where weight gradients are summed one per thread.
        weights *= 2 + torch.get_num_threads()
        return (copies + reordered + weights) * problem.element_bytes + SMALL_BUFFERS

    def effort(self, problem: ConvProblem, algorithm: str, count: int = 1) -> Effort:
        copies = map(math.prod, (problem.x_shape, problem.y_shape))
        return Effort.of(0, *(problem.element_bytes * copy for copy in copies), times=count)

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        for part in parts:
            even = evened(part.problem)
            result = onednn_result(even.problem, even.operands(part))
            accumulate = part.write(even.result(result), accumulate)
            del result


def onednn_result(problem: ConvProblem, operands: Operands) -> torch.Tensor:
    """The result of oneDNN's kernel for a problem it serves, in torch's layout; only the target's shape is read."""
    return stock_result(problem, _converted(problem, operands)).to_dense()


def _converted(problem: ConvProblem, operands: Operands) -> Operands:
    """x and y in oneDNN's layout; of the target, the shape alone is read."""
    x, y = (
        torch.empty(tensor.shape, dtype=tensor.dtype, layout=torch._mkldnn)  # type: ignore[attr-defined]
        if role is problem.target
        else tensor.contiguous().to_mkldnn()
        for role, tensor in ((Role.X, operands.x), (Role.Y, operands.y))
    )
    return Operands(x, operands.w.contiguous(), y, operands.bias)


def _is_ordinary(problem: ConvProblem) -> bool:
    """Whether oneDNN may be asked: what it allocates is bounded, and what it does is right.

    Its kernels for weight gradients write beyond their memory where a kernel reaches across the whole image (seen with
    torch 2.13), and those for transposed, dilated and strided convolutions take scratch memory of their own. Gradients
    of data may be padded up to the kernel's reach, as those of a slab between others are.
    """
    return not problem.transposed and is_inner(problem, most=1 if problem.target is Role.X else 2)


def is_inner(problem: ConvProblem, most: int = 2) -> bool:
    """Whether a kernel without strides and dilations fits into the image and exceeds `most` times its padding."""
    spatial = zip(problem.windows, problem.padding, problem.x_shape[2:], strict=True)
    return all(
        window.stride == window.dilation == 1 and most * padding < window.reach <= extent
        for window, padding, extent in spatial
    )


def _blocked(channels: int, groups: int) -> int:
    """Channels of all groups with the padding of oneDNN's blocks; depthwise kernels are blocked over the groups."""
    if channels == 1:
        return -(-groups // BLOCK) * BLOCK
    return -(-channels // BLOCK) * BLOCK * groups
