"""Which of torch's kernels a rank's part of a convolution uses on a CPU: the one that torch uses for the whole.

Torch gives large samples to oneDNN, and small ones to a kernel that first writes out the operands of all products
(im2col). A rank's part of a large volume may count as small. The other kernel would take two to eleven times as long as
oneDNN's for the same part, and memory for 27 copies of the inputs if a kernel has 3x3x3 elements. Images are left to
torch: where it chooses im2col for them, oneDNN is no faster, since copies in its own layout take longer than they save.
What torch still computes by im2col, such as all of float64, is computed in strips where it is large.

Where mucudnn is at work, it decides: oneDNN is among the algorithms that it measures.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from distconv.rules.convolution import strips
from distconv.rules.convolution.strips import in_strips, problem_of, rows_of_strips
from distconv.transfer.tracing import has_no_numbers
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.providers.onednn import OneDnn, onednn_result
from mucudnn.providers.stock import torchs_backend
from mucudnn.runtime import shim

LEAST = 8192
"""Elements of a part below which it is left to torch: copies in oneDNN's layout would take longer than they save."""

Arguments = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]
"""Stride, padding, dilation, whether it is transposed, output padding and groups, as `aten::convolution` has them."""


def goes_to_onednn(shape: Sequence[int], weight: Sequence[int], dtype: torch.dtype | None, arguments: Any) -> bool:
    """Whether torch, on a CPU, hands a convolution of a volume and a weight of these shapes to oneDNN."""
    if dtype is not torch.float32 or len(shape) != 5 or 0 in shape or 0 in weight:
        return False
    x, w = (torch.empty(1).expand(*sizes) for sizes in (shape, weight))  # shapes without memory
    return "Mkldnn" in torch._C._select_conv_backend(x, w, None, *arguments, None).name


def differs(
    whole: bool, x: Sequence[int], weight: Sequence[int], dtype: torch.dtype | None, arguments: Arguments
) -> bool:
    """Whether `local_convolution` computes a rank's part, of these shapes, otherwise than torch's own function."""
    key, threads = _key(arguments), torch.get_num_threads()
    forward, x, weight = Direction.FORWARD, torch.Size(x), torch.Size(weight)
    if whole and (_problem(forward, x, weight, key, threads) or _thicker((forward,), x, weight, key, threads)):
        return True
    return dtype is not None and rows_of_strips(x, weight, dtype, key) is not None


def is_torchs(whole: bool, elements: int, weight: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether torch's own function computes every convolution of so many elements at most, wherever it runs."""
    return not whole and elements * math.prod(weight[1:]) * dtype.itemsize < strips.LEAST


def local_convolution(whole: bool, x: Tensor, weight: Tensor, bias: Tensor | None, arguments: Arguments) -> Tensor:
    """``aten::convolution`` of a rank's part. ``whole``: whether the whole goes to oneDNN on a CPU."""
    may_write_out = x.numel() * weight.numel() * x.element_size() >= strips.LEAST * weight.shape[0]
    if (whole or may_write_out) and _may(x, weight):
        key, threads = _key(arguments), torch.get_num_threads()
        if whole and (thick := _thicker((Direction.FORWARD,), x.shape, weight.shape, key, threads)) is not None:
            x, key = torch.ops.aten.constant_pad_nd.default(x, thick[0]), thick[1]
        problem = _problem(Direction.FORWARD, x.shape, weight.shape, key, threads) if whole else None
        if problem is not None:
            return _onednn(x, weight, None, bias, problem)
        rows = rows_of_strips(x.shape, weight.shape, x.dtype, key)
        if rows is not None:
            return in_strips(x, weight, bias, key, rows)
    with torch._C._AutoDispatchBelowAutograd():  # callers have a backward of their own; autograd's key is for DTensors
        return torch.convolution(x, weight, bias, *arguments)


def local_gradients(
    whole: bool, grad: Tensor, x: Tensor, weight: Tensor, arguments: Arguments, for_data: bool, for_filter: bool
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients that are asked for, of dL/dx and dL/dweight, as ``aten::convolution_backward`` gives them."""
    if whole and _may(x, weight):
        key, threads = _key(arguments), torch.get_num_threads()
        wanted = ((Direction.BACKWARD_DATA, for_data), (Direction.BACKWARD_FILTER, for_filter))
        directions = tuple(direction for direction, is_wanted in wanted if is_wanted)
        if (thick := _thicker(directions, x.shape, weight.shape, key, threads)) is not None:
            padded = torch.ops.aten.constant_pad_nd.default(x, thick[0])
            dx, dw = local_gradients(whole, grad, padded, weight, thick[1], for_data, for_filter)
            for dim, before in enumerate(thick[0][::-2], 2):
                dx = None if dx is None else dx.narrow(dim, before, x.shape[dim])
            return dx, dw
        asked = [
            _problem(direction, x.shape, weight.shape, key, threads) if is_wanted else None
            for direction, is_wanted in wanted
        ]
        if [problem is not None for problem in asked] == [for_data, for_filter]:
            return (
                None if asked[0] is None else _onednn(None, weight, grad, None, asked[0]),
                None if asked[1] is None else _onednn(x, None, grad, None, asked[1]),
            )
    dx, dw, _ = torch.ops.aten.convolution_backward(grad, x, weight, None, *arguments, [for_data, for_filter, False])
    return dx if for_data else None, dw if for_filter else None


_devices = {"cpu"}  # The kinds of devices whose tensors oneDNN may be asked for.


@contextlib.contextmanager
def as_on_a_processor(threads: int) -> Iterator[None]:
    """A context in which calls on tensors without data count as those of a rank with these threads on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    _devices.add("meta")
    try:
        yield
    finally:
        _devices.discard("meta")
        torch.set_num_threads(before)


def _may(x: Tensor, weight: Tensor) -> bool:
    """Whether another kernel may serve these tensors; the same when a graph is traced and when it runs."""
    return (
        x.device.type == weight.device.type
        and x.device.type in _devices
        and x.dtype is weight.dtype
        and shim.current_session() is None
        and x.is_contiguous()
    )


def _key(arguments: Arguments) -> Any:
    stride, padding, dilation, transposed, output_padding, groups = arguments
    return tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups


@functools.lru_cache(maxsize=4096)
def _problem(direction: Direction, x: Sequence[int], w: Sequence[int], arguments: Any, _: int) -> ConvProblem | None:
    """The problem of one direction, where oneDNN serves it and torch would take another kernel. By threads, too."""
    if arguments[3] or math.prod(x) < LEAST:
        return None
    problem = problem_of(direction, tuple(x), tuple(w), arguments)
    return problem if problem is not None and OneDnn().algorithms(problem) else None


@functools.lru_cache(maxsize=4096)
def _thicker(
    directions: Sequence[Direction], x: Sequence[int], w: Sequence[int], arguments: Any, threads: int
) -> tuple[list[int], Any] | None:
    """A slab that is thinner than the kernel is given some of its padding as zeros, where oneDNN serves it then: these
    zeros, and the arguments with less padding. None: it stays as it is."""
    stride, padding, *rest = arguments
    zeros = [min(p, max(0, -(-(k - n) // 2))) for n, k, p in zip(x[2:], w[2:], padding, strict=True)]
    if not any(zeros) or math.prod(x) < LEAST:
        return None
    shape = (*x[:2], *(n + 2 * more for n, more in zip(x[2:], zeros, strict=True)))
    less = (stride, tuple(p - more for p, more in zip(padding, zeros, strict=True)), *rest)
    if any(_problem(direction, shape, w, less, threads) is None for direction in directions):
        return None
    problems = (problem_of(direction, tuple(x), tuple(w), arguments) for direction in directions)
    if any(problem is None or "Mkldnn" in torchs_backend(problem) for problem in problems):
        return None
    return [more for each in reversed(zeros) for more in (each, each)], less


def _onednn(x: Tensor | None, w: Tensor | None, y: Tensor | None, bias: Tensor | None, problem: ConvProblem) -> Tensor:
    """Computes the one of x, weight and y of a convolution that is None from the other two."""
    present = [tensor for tensor in (x, w, y) if tensor is not None]
    if has_no_numbers(present[0]) or has_no_numbers(present[1]) or present[0].is_meta:
        _, padding, *_, groups = problem.arguments
        shape = list(problem.target_shape)
        return ONEDNN(x, w, y, bias, shape, list(padding), groups)
    target = present[0].new_empty(1).expand(problem.target_shape)
    x, w, y = (target if tensor is None else tensor for tensor in (x, w, y))
    return onednn_result(problem, Operands(x, w, y, bias))


_library = torch.library.Library("distconv", "FRAGMENT")
_library.define(
    "onednn_convolution(Tensor? x, Tensor? w, Tensor? y, Tensor? bias, SymInt[] shape, SymInt[] padding, int groups)"
    " -> Tensor",
    tags=[torch.Tag.pt2_compliant_tag],
)


def _of_graph(
    x: Tensor | None,
    w: Tensor | None,
    y: Tensor | None,
    bias: Tensor | None,
    shape: list[int],
    padding: list[int],
    groups: int,
) -> Tensor:
    """The operator of a graph: ``_onednn``, which has been decided on when the graph was made."""
    shapes = [tuple(shape if tensor is None else tensor.shape) for tensor in (x, w)]
    direction = Direction.BACKWARD_DATA if x is None else Direction.BACKWARD_FILTER if w is None else Direction.FORWARD
    ones, zeros = (1,) * len(padding), (0,) * len(padding)
    problem = problem_of(direction, *shapes, (ones, tuple(padding), ones, False, zeros, groups))
    assert problem is not None, "it was one when the graph was made"
    return _onednn(x, w, y, bias, problem)


def _shape_only(
    x: Tensor | None, w: Tensor | None, y: Tensor | None, bias: Tensor | None, shape: list[int], *_: Any
) -> Tensor:
    present = next(tensor for tensor in (x, w, y) if tensor is not None)
    return present.new_empty(shape)


_library.impl("onednn_convolution", _of_graph, "CPU")
torch.library.register_fake("distconv::onednn_convolution", _shape_only, lib=_library)

ONEDNN: Any = torch.ops.distconv.onednn_convolution
"""The operator of a graph, and of tensors without numbers."""


@register_flop_formula(ONEDNN)
def _flops(x: Any, w: Any, y: Any, bias: Any, shape: Any, *_: Any, **__: Any) -> int:
    """Multiplications and additions of any direction, from the shapes of two of x, weight and y and of the third."""
    w, y = (shape if sizes is None else sizes for sizes in (w, y))
    return 2 * math.prod(y) * math.prod(w[1:])
