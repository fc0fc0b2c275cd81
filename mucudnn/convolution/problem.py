"""The immutable key of one convolution in one direction (`ConvProblem`)."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

from mucudnn.convolution.geometry import Window

Shape = tuple[int, ...]


class Direction(enum.StrEnum):
    """The result that is computed: the output, the input's gradient, or the weight's gradient."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward_data"
    BACKWARD_FILTER = "backward_filter"


class Dim(enum.StrEnum):
    """The dim that is divided: the mini-batch, or a spatial dim of what is computed, as a rule the outermost."""

    BATCH = "batch"
    DEPTH = "depth"
    HEIGHT = "height"
    WIDTH = "width"
    LENGTH = "length"


class Role(enum.StrEnum):
    """The three tensors of the ordinary convolution y = x * w."""

    X = "x"
    W = "w"
    Y = "y"


DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""The element types that are divided, with their sizes."""

_KEPT = ("stride", "padding", "dilation", "groups", "transposed", "dtype", "formats")
"""The fields of a problem that are in its database key unchanged."""

ALIGNMENT = 16
"""Bytes of the largest alignment that any algorithm asks for; tensors of torch's own start at multiples of more."""


# Planning makes thousands of problems, whose windows are few.
_window = lru_cache(maxsize=4096)(Window)


@dataclass(frozen=True)
class ConvProblem:
    """One convolution in one direction, without anything of the machine it runs on.

    A transposed convolution is an ordinary one with its ends exchanged: its input is `y`, its output `x`, and its
    forward pass is the ordinary backward data pass. So there are three products only, `target` names the one that is
    wanted, and one path serves all directions of both kinds.

    Attributes:
        direction: the pass, in the caller's words.
        x_shape: (N, C, *spatial) of the ordinary convolution's input.
        w_shape: (F, C / groups, *kernel).
        y_shape: (N, F, *spatial) of the ordinary convolution's output.
        stride, padding, dilation: per spatial dim. Padding is that before the first input; that after the last one
            follows from the shapes, as a part of a convolution has other neighbours at its two ends.
        groups: divides C and F.
        transposed: whether the caller's convolution is a transposed one.
        dtype: a key of `DTYPE_BYTES`.
        formats: the memory formats of x, w and y ("contiguous", "channels_last", "strided"); of the one to be computed
            as torch lays it out.
        alignment: bytes that the addresses of x and y are multiples of, at most `ALIGNMENT`: less for a part that
            begins at an odd place within larger tensors.
    """

    direction: Direction
    x_shape: Shape
    w_shape: Shape
    y_shape: Shape
    stride: Shape
    padding: Shape
    dilation: Shape
    groups: int
    transposed: bool
    dtype: str
    formats: tuple[str, str, str]
    alignment: int = ALIGNMENT

    @classmethod
    def of_convolution(
        cls,
        direction: Direction,
        input_shape: Shape,
        weight_shape: Shape,
        *,
        stride: Shape,
        padding: Shape,
        dilation: Shape,
        groups: int = 1,
        transposed: bool = False,
        output_padding: Shape | None = None,
        dtype: str = "float32",
        formats: tuple[str, str, str] = ("contiguous", "contiguous", "contiguous"),
    ) -> Self:
        """The problem of an `aten::convolution` call, its output shape worked out.

        Args:
            input_shape: (N, channels, *spatial) of the caller's input.
            weight_shape: as the caller's: (F, C / groups, *kernel), of a transposed one (C, F / groups, *kernel).
            output_padding: of a transposed convolution; zeros if not given.

        Raises:
            ValueError: for shapes that are no convolution.
        """
        dims = len(input_shape) - 2
        lengths = {len(weight_shape) - 2, len(stride), len(padding), len(dilation)}
        if dims < 1 or lengths != {dims} or min(*stride, *dilation) < 1 or min(padding) < 0:
            raise ValueError(
                f"input {input_shape}, weight {weight_shape}, stride {stride}, padding {padding} and "
                f"dilation {dilation} are not of one convolution"
            )
        windows = [Window(*w) for w in zip(weight_shape[2:], stride, padding, dilation, strict=True)]
        channels = weight_shape[0] if transposed else weight_shape[1] * groups
        if groups < 1 or weight_shape[0] % groups or input_shape[1] != channels:
            raise ValueError(
                f"input {input_shape} does not have the channels of weight {weight_shape}, groups={groups}"
            )
        spatial = input_shape[2:]
        if transposed:
            extra = output_padding or (0,) * dims
            produced = tuple(w.transposed_outputs(n, e) for w, n, e in zip(windows, spatial, extra, strict=True))
            output_shape = (input_shape[0], weight_shape[1] * groups, *produced)
        else:
            produced = tuple(w.outputs(n) for w, n in zip(windows, spatial, strict=True))
            output_shape = (input_shape[0], weight_shape[0], *produced)
        if min(*input_shape, *weight_shape, *output_shape) < 1:
            raise ValueError(f"input {input_shape} and weight {weight_shape} give an output {output_shape}")
        x_shape, y_shape = (output_shape, input_shape) if transposed else (input_shape, output_shape)
        return cls(
            direction, x_shape, weight_shape, y_shape, stride, padding, dilation, groups, transposed, dtype, formats
        )

    @cached_property
    def target(self) -> Role:
        """The one of x, w and y that is computed from the other two."""
        if self.direction is Direction.BACKWARD_FILTER:
            return Role.W
        return Role.Y if (self.direction is Direction.FORWARD) != self.transposed else Role.X

    @property
    def extent(self) -> int:
        """Samples in the mini-batch."""
        return self.x_shape[0]

    @cached_property
    def dims(self) -> int:
        """Spatial dims: 1, 2 or 3."""
        return len(self.stride)

    @cached_property
    def windows(self) -> tuple[Window, ...]:
        """The geometry along each spatial dim."""
        return tuple(map(_window, self.w_shape[2:], self.stride, self.padding, self.dilation))

    @cached_property
    def padding_after(self) -> Shape:
        """Padding after the last input, per spatial dim; negative where the last inputs are not read."""
        return tuple(
            window.inputs((0, outputs))[1] - inputs
            for window, inputs, outputs in zip(self.windows, self.x_shape[2:], self.y_shape[2:], strict=True)
        )

    @property
    def spatial_dims(self) -> tuple[Dim, ...]:
        """The names of the spatial dims, the outermost first."""
        return (Dim.LENGTH,) if self.dims == 1 else (Dim.DEPTH, Dim.HEIGHT, Dim.WIDTH)[-self.dims :]

    @property
    def output_padding(self) -> Shape:
        """The extent that a transposed convolution adds to its smallest output; zeros for an ordinary one."""
        if not self.transposed:
            return (0,) * self.dims
        pairs = zip(self.windows, self.x_shape[2:], self.y_shape[2:], strict=True)
        return tuple(n - window.transposed_outputs(m) for window, n, m in pairs)

    @property
    def input_shape(self) -> Shape:
        """Shape of the caller's input."""
        return self.y_shape if self.transposed else self.x_shape

    @property
    def output_shape(self) -> Shape:
        """Shape of the caller's output."""
        return self.x_shape if self.transposed else self.y_shape

    @cached_property
    def arguments(self) -> tuple[Shape, Shape, Shape, bool, Shape, int]:
        """(stride, padding, dilation, transposed, output_padding, groups), as `aten::convolution` takes them."""
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    @cached_property
    def target_shape(self) -> Shape:
        """Shape of what is computed."""
        return {Role.X: self.x_shape, Role.W: self.w_shape, Role.Y: self.y_shape}[self.target]

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def is_half(self) -> bool:
        """Whether the type has two bytes, so that sums over parts must be kept in a wider one."""
        return self.element_bytes == 2

    @property
    def flops(self) -> int:
        """Floating-point operations of the direct method: 2 per multiply-accumulate."""
        return 2 * math.prod(self.y_shape) * math.prod(self.w_shape[1:])

    def with_extent(self, extent: int) -> ConvProblem:
        """The same convolution over another number of samples."""
        if extent == self.extent:
            return self
        return replace(self, x_shape=(extent, *self.x_shape[1:]), y_shape=(extent, *self.y_shape[1:]))

    def launch_key(self) -> dict[str, Any]:
        """Everything of the problem that changes a launch's time, except its extent: plain values for a database.

        The alignment is left out: the same algorithm at another address takes about as long.
        """
        shapes = {"x": self.x_shape[1:], "w": self.w_shape, "y": self.y_shape[1:]}
        return {"direction": str(self.direction), **shapes, **{name: getattr(self, name) for name in _KEPT}}

    @classmethod
    def from_launch_key(cls, key: Mapping[str, Any], extent: int) -> Self:
        """The problem of so many samples that has this `launch_key`, other entries being left aside."""
        kept: dict[str, Any] = {name: tuple(key[name]) if isinstance(key[name], list) else key[name] for name in _KEPT}
        x, y = (extent, *key["x"]), (extent, *key["y"])
        return cls(Direction(key["direction"]), x, tuple(key["w"]), y, **kept)

    def __str__(self) -> str:
        """The problem in one line, in the caller's words: input, weight and what differs from the plain case."""

        def join(values: Shape) -> str:
            return "x".join(map(str, values))

        words = [join(self.input_shape), f"{'T' if self.transposed else 'k'}{join(self.w_shape)}"]
        for sign, values, plain in (("s", self.stride, 1), ("p", self.padding, 0), ("d", self.dilation, 1)):
            if set(values) != {plain}:
                words.append(sign + join(values if len(set(values)) > 1 else values[:1]))
        if self.groups > 1:
            words.append(f"g{self.groups}")
        if self.dtype != "float32":
            words.append(self.dtype)
        formats = zip(Role, self.formats, strict=True)
        words += [f"{role}:{name}" for role, name in formats if name not in ("", "contiguous")]
        return " ".join(words)
