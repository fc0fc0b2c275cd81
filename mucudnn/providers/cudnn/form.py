"""The description of a convolution problem in cuDNN's terms: shapes, strides and padding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from mucudnn.convolution.call import torch_format
from mucudnn.convolution.problem import ConvProblem, Role, Shape

MOST_ELEMENTS = 2**31 - 1
"""The most elements of a tensor for cuDNN: some engines count elements with 32 bits, though they accept larger ones."""


@dataclass(frozen=True)
class Form:
    """Shapes, strides and geometry in cuDNN's terms.

    One spatial dim becomes two, the first of extent 1, as in torch. All three tensors have one memory format, which is
    that of the target; what comes in another one is copied first.

    Attributes:
        format: "contiguous" or "channels_last".
        shapes: of x, w and y, four or five dims.
        padding, padding_after, stride, dilation: per spatial dim.
        copied: the tensors whose memory differs from the format, the target among them where it does.
        copied_bytes: of those copies.
    """

    problem: ConvProblem
    format: str
    shapes: tuple[Shape, Shape, Shape]
    padding: Shape
    padding_after: Shape
    stride: Shape
    dilation: Shape
    copied: frozenset[Role]
    copied_bytes: int

    @property
    def strides(self) -> tuple[Shape, ...]:
        """The strides of x, w and y, in elements."""
        return tuple(strides(shape, self.format) for shape in self.shapes)

    @property
    def memory_format(self) -> torch.memory_format:
        return torch_format(self.format, len(self.shapes[0]))

    @property
    def is_symmetric(self) -> bool:
        """Whether the padding is the same at both ends, as the legacy functions need it."""
        return self.padding == self.padding_after


@lru_cache(maxsize=65536)
def form(problem: ConvProblem) -> Form | None:
    """None for a problem that cuDNN cannot compute: it `is_too_large`, or no kernel's step reaches its last inputs."""
    after = _padding_after(problem)
    if after is None or is_too_large(problem):
        return None
    flat = problem.dims == 1
    shapes = problem.x_shape, problem.w_shape, problem.y_shape
    if flat:
        shapes = tuple((*shape[:2], 1, *shape[2:]) for shape in shapes)  # type: ignore[assignment]
    named = dict(zip(Role, zip(shapes, problem.formats, strict=True), strict=True))
    bytes_copied = {}
    for name in ("contiguous", "channels_last"):
        other = {role for role, (shape, given) in named.items() if not _is_same(shape, given, name)}
        if name == "contiguous" or problem.target not in other:
            bytes_copied[name] = other, sum(math.prod(named[role][0]) for role in other) * problem.element_bytes
    if problem.target in bytes_copied["contiguous"][0] and "channels_last" in bytes_copied:
        del bytes_copied["contiguous"]
    chosen = min(bytes_copied, key=lambda name: bytes_copied[name][1])
    copied, count = bytes_copied[chosen]
    one = (1,) if flat else ()
    zero = (0,) if flat else ()
    return Form(
        problem,
        chosen,
        shapes,
        (*zero, *problem.padding),
        (*zero, *after),
        (*one, *problem.stride),
        (*one, *problem.dilation),
        frozenset(copied),
        count,
    )


def is_too_large(problem: ConvProblem) -> bool:
    """Whether a tensor has more elements than cuDNN is given, so that only parts of the problem are for cuDNN."""
    return max(map(math.prod, (problem.x_shape, problem.w_shape, problem.y_shape))) > MOST_ELEMENTS


def strides(shape: Shape, name: str) -> Shape:
    """The strides of a dense tensor in a memory format, in elements."""
    return torch.empty(shape, device="meta", memory_format=torch_format(name, len(shape))).stride()


def _is_same(shape: Shape, given: str, wanted: str) -> bool:
    """Whether a tensor in the given format is also in the wanted one: dims of extent 1 may have any stride."""
    if given == "strided":
        return False
    return all(n == 1 or a == b for n, a, b in zip(shape, strides(shape, given), strides(shape, wanted), strict=True))


def _padding_after(problem: ConvProblem) -> Shape | None:
    """Padding after the last input with which cuDNN finds the problem's output shape, that before it if possible."""
    found = []
    for window, inputs, outputs, least in zip(
        problem.windows, problem.x_shape[2:], problem.y_shape[2:], problem.padding_after, strict=True
    ):
        for after in (window.padding, max(0, least)):
            if (inputs + window.padding + after - window.reach) // window.stride + 1 == outputs:
                found.append(after)
                break
        else:
            return None
    return tuple(found)
