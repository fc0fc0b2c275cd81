"""What an operator computes, and the scratch memory of its kernel on a processor, from the shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from distconv.rules.convolution import kernels, strips  # which define operators
from distconv.turns.shapes_only import fake_tensors
from distconv.turns.strides import LAST, is_channels_last
from distconv.turns.work import Work
from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import Direction
from mucudnn.providers.onednn_copies import copies_bytes
from mucudnn.providers.stock import BLOCK, columns_bytes

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Operators whose operations torch does not count (attention on a processor), with others that have as many."""


def operations_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The operations of an operator that convolves or multiplies matrices, else 0."""
    counted = ATTENTION.get(func.overloadpacket, func.overloadpacket)
    return int(flop_registry[counted](*args, **kwargs, out_val=result)) if counted in flop_registry else 0


def add_work(work: Work, func: Any, args: Any, kwargs: Any, result: Any, makes: bool = True) -> None:
    """Adds the work of an operator; ``makes``: whether its results may have memory of their own."""
    work.operators += 1
    work.operations += operations_of(func, args, kwargs, result)
    if makes or func._schema.is_mutable:
        work.bytes += sum(x.numel() * x.element_size() for x in fake_tensors((args, *kwargs.values(), result)))


def scratch_bytes(func: Any, args: Any, made: Sequence[Tensor]) -> int:
    """About the scratch bytes of torch's kernel of a convolution, batch norm or recurrent layer on a processor."""
    if func is torch.ops.aten.mkldnn_rnn_layer.default:
        x, *weights = args[:3]
        gates = x.shape[0] * x.shape[1] * weights[0].shape[0] * x.element_size()
        return sum(w.numel() * w.element_size() for w in weights) + 2 * gates
    if func is torch.ops.aten.native_batch_norm_backward.default:
        return made[0].untyped_storage().nbytes()
    if func is kernels.ONEDNN.default:
        x, w, y, _, shape, *_ = args
        return _onednn_bytes(x, w, y, shape)
    if func is torch.ops.distconv.convolution_in_strips.default:
        return strips.bytes_of_strips(*args)
    return max(map(_convolution_bytes, convolutions_of(func, args)), default=0)


def _convolution_bytes(call: Call) -> int:
    """The scratch bytes of torch's kernel of a convolution, which first copies what is in another memory format than it
    computes in."""
    problem = call.problem()
    if problem is None:
        return 0
    x, w, grad = call.input, call.weight, call.grad_output
    in_last = any(t.dim() > 3 and is_channels_last(t) for t in (x, w))
    form = "channels_last" if in_last else "contiguous"
    read = [t for t in (x, grad) if t is not None]
    copied = sum(t.numel() * t.element_size() for t in read if not _is_in(t, in_last))
    problem = replace(problem, formats=(form, form, form))
    return copied + columns_bytes(problem) + copies_bytes(problem)


def _is_in(x: Tensor, channels_last: bool) -> bool:
    """Whether a tensor is in a memory format, strides of dims of one element included."""
    return is_channels_last(x) and x.is_contiguous(memory_format=LAST[x.dim()]) if channels_last else x.is_contiguous()


def convolutions_of(func: Any, args: Any) -> list[Call]:
    """The convolutions that an operator of torch computes."""
    if func is torch.ops.aten.convolution.default:
        x, w, bias, *geometry = args
        return [Call(Direction.FORWARD, x, w, bias, None, *_geometry(geometry))]
    if func is torch.ops.aten.convolution_backward.default:
        grad, x, w, _, *geometry, asked = args
        both = zip((Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER), asked, strict=False)
        return [Call(direction, x, w, None, grad, *_geometry(geometry)) for direction, is_asked in both if is_asked]
    return []


def _onednn_bytes(x: Tensor | None, w: Tensor | None, y: Tensor | None, shape: Sequence[int]) -> int:
    """The scratch bytes of a convolution of oneDNN that computes the tensor that is None, of ``shape``: it copies the
    other two, and all three again into blocks of channels."""
    (samples, channels, *space), weight, (_, filters, *of_result) = (shape if t is None else t.shape for t in (x, w, y))
    block = BLOCK // 2 if w is None and 1 < channels <= BLOCK // 2 else BLOCK
    is_read_as_it_is = x is not None and (channels == 1 or (y is None and channels < BLOCK))
    blocked = 0 if is_read_as_it_is else samples * -(-channels // block) * block * math.prod(space)
    blocked += samples * -(-filters // block) * block * math.prod(of_result)
    element = next(t.element_size() for t in (x, y) if t is not None)
    return (blocked + math.prod(weight) + sum(t.numel() for t in (x, y) if t is not None)) * element


def _geometry(values: Sequence[Any]) -> tuple[Any, ...]:
    stride, padding, dilation, transposed, output_padding, groups = values[:6]
    return tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups
