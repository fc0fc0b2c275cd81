"""What kernels of norms and recurrent layers take beside their tensors, as torch's allocator counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distconv.rules.convolution.strips import rows_of_strips
from distconv.turns.operations import scratch_bytes
from mucudnn.devices.allocations import peak_bytes

aten = torch.ops.aten


def batch_norm() -> tuple[Any, tuple[Any, ...]]:
    x, c = torch.randn(2, 32, 64, 64), torch.ones(32)
    arguments = torch.randn_like(x), x, c, c, c, c, c, True, 1e-5, [True, True, True]
    return aten.native_batch_norm_backward.default, arguments


def lstm() -> tuple[Any, tuple[Any, ...]]:
    x, state = torch.randn(200, 1, 128), torch.zeros(1, 1, 128)
    weights = torch.randn(512, 128), torch.randn(512, 128), torch.randn(512), torch.randn(512)
    rest = False, [], 2, 128, 1, True, False, False, False
    return aten.mkldnn_rnn_layer.default, (x, *weights, state[0], state[0], *rest)


@pytest.mark.parametrize("call", [batch_norm, lstm])
def test_scratch_of_kernels_is_known(call: Callable[[], tuple[Any, tuple[Any, ...]]]) -> None:
    func, arguments = call()
    results = [x for x in func(*arguments) if isinstance(x, torch.Tensor)]
    made = sum(x.untyped_storage().nbytes() for x in results)
    taken = peak_bytes(lambda: func(*arguments), torch.device("cpu")) - made
    predicted = scratch_bytes(func, arguments, results)
    assert 0 < taken <= 1.1 * predicted and predicted <= 2 * taken


COPIED = {
    ((1, 16, 6, 64, 64), 16): (3.53, 5.07, 4.04),
    ((1, 20, 6, 64, 64), 20): (6.36, 8.24, 6.99),
    ((1, 1, 6, 64, 64), 16): (3.53, 2.11, 1.11),
    ((1, 4, 16, 96, 96), 16): (24.8, 22.5, 10.1),
    ((1, 8, 16, 96, 96), 8): (20.8, 16.9, 12.4),
    ((1, 12, 16, 96, 96), 12): (22.8, 29.6, 14.7),
    ((1, 64, 4, 16, 16), 64): (0.93, 1.22, 1.06),
    ((1, 128, 6, 32, 32), 64): (5.85, 8.85, 7.86),
}
"""By shape and filters of 3x3x3 with padding (0, 1, 1): MiB that a counter of all allocations has shown beside the
result, for the gradients of input and weight, and for the output. Torch's allocator does not give them."""


@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("shape, filters", COPIED)
def test_copies_of_onednn_are_known(shape: tuple[int, ...], filters: int, asked: int) -> None:
    tensors = [torch.empty(shape), torch.empty(filters, shape[1], 3, 3, 3)]
    tensors.append(torch.empty(1, filters, shape[2] - 2, *shape[3:]))
    given = [None if place == asked else each for place, each in enumerate(tensors)]
    arguments = *given, None, list(tensors[asked].shape), [0, 1, 1], 1
    found = scratch_bytes(torch.ops.distconv.onednn_convolution.default, arguments, [tensors[asked]])
    assert found / 2**20 == pytest.approx(COPIED[shape, filters][asked], rel=0.05)


@pytest.mark.parametrize("shape", [(1, 16, 24, 48, 48), (2, 16, 128, 96)])
def test_strips_take_what_one_of_them_writes_out(shape: tuple[int, ...]) -> None:
    x, dims = torch.randn(shape, dtype=torch.float64), len(shape) - 2
    w, arguments = x.new_ones(8, shape[1], *(3,) * dims), ((1,) * dims, (1,) * dims, (1,) * dims)
    rows = rows_of_strips(x.shape, w.shape, x.dtype, (*arguments, False, (0,) * dims, 1))
    assert rows is not None
    func, given = torch.ops.distconv.convolution_in_strips.default, (x, w, None, *arguments, 1, *rows)
    result = func(*given)
    taken = peak_bytes(lambda: func(*given), torch.device("cpu")) - result.nbytes
    assert scratch_bytes(func, given, [result]) == pytest.approx(taken, rel=0.01)


IN_FORMATS = {
    ("contiguous", 1, 3): (18.2, 18.1, 36.2),
    ("channels_last", 1, 3): (0.3, 18.3, 18.4),
    ("other strides", 1, 3): (36.2, 36.1, 54.2),
    ("one sample, ambiguous", 1, 3): (36.2, 36.1, 54.2),
    ("contiguous", 2, 3): (18.2, 36.0, 22.7),
    ("weights in channels_last", 1, 3): (18.2, 36.2, 36.3),
}
"""By format of the input, stride and extent of the filter of a convolution of 64 x 192 x 384 to as many channels: MiB
besides the result, for the output and for gradients of input and weight of a contiguous gradient."""


def in_format(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = torch.empty(1, 64, 192, 384), torch.empty(64, 64, 3, 3)
    if name == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif name == "other strides":
        x = torch.empty(1, 192, 64, 384).transpose(1, 2)
    elif name == "one sample, ambiguous":
        x = torch.empty(1, 192 * 384, 64).transpose(1, 2).reshape(x.shape)
    elif name == "weights in channels_last":
        w = w.contiguous(memory_format=torch.channels_last)
    return x, w


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="measured with AVX-512")
@pytest.mark.parametrize("case", IN_FORMATS)
def test_what_a_convolution_copies_depends_on_memory_formats(case: tuple[str, int, int]) -> None:
    name, stride, extent = case
    x, w = in_format(name)
    geometry = (stride,) * 2, (extent // 2,) * 2, (1, 1), False, (0, 0), 1
    grad = torch.empty(1, 64, 192 // stride, 384 // stride)
    found = [scratch_bytes(aten.convolution.default, (x, w, None, *geometry), [grad])]
    for asked in ([True, False, False], [False, True, False]):
        found.append(scratch_bytes(aten.convolution_backward.default, (grad, x, w, None, *geometry, asked), [x]))
    assert [each / 2**20 for each in found] == pytest.approx(IN_FORMATS[case], rel=0.05, abs=0.2)
