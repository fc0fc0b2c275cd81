"""Which kernel of oneDNN computes a convolution, as oneDNN itself reports it, and the memory of its columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.providers.onednn_copies import copies_bytes, writes_columns

IS_AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"


class Shapes(NamedTuple):
    """An image or a row of ``extent`` positions in each dim, and a filter with as much padding as keeps it as large."""

    channels: int
    filters: int
    extent: tuple[int, ...]
    kernel: int
    dilation: int = 1
    stride: int = 1
    groups: int = 1

    def call(self, direction: Direction) -> Call:
        dims = len(self.extent)
        padding = self.dilation * (self.kernel - 1) // 2
        x = torch.zeros(2, self.channels, *self.extent)
        w = torch.zeros(self.filters, self.channels // self.groups, *(self.kernel,) * dims)
        every = ((self.stride,) * dims, (padding,) * dims, (self.dilation,) * dims)
        y = torch.ops.aten.convolution(x.to("meta"), w.to("meta"), None, *every, False, (0,) * dims, self.groups)
        grad = None if direction is Direction.FORWARD else torch.zeros(y.shape)
        return Call(direction, x, w, None, grad, *every, False, (0,) * dims, self.groups)

    def problem(self, direction: Direction) -> ConvProblem:
        found = self.call(direction).problem()
        assert found is not None
        return found


def _kernel(call: Call, capfd: Any) -> str:
    """The name of the kernel that computes a call."""
    geometry = (call.stride, call.padding, call.dilation, call.transposed, call.output_padding, call.groups)
    with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
        if call.grad_output is None:
            torch.ops.aten.convolution(call.input, call.weight, None, *geometry)
        else:
            asked = [call.direction is Direction.BACKWARD_DATA, call.direction is Direction.BACKWARD_FILTER, False]
            torch.ops.aten.convolution_backward(call.grad_output, call.input, call.weight, [0], *geometry, asked)
    lines = [line.split(",") for line in capfd.readouterr().out.splitlines() if ",convolution," in line]
    return next(word for line in lines for word in line if ":" in word and word.split(":")[0] in KINDS)


KINDS = "jit", "jit_1x1", "jit_dw", "x64", "brg_conv_fwd", "brgconv", "brgconv_strided", "brgconv_1x1", "ref", "simple"

CASES = [
    Shapes(64, 64, (72, 72), 3),
    Shapes(64, 64, (72, 72), 3, dilation=5),
    Shapes(64, 64, (72, 72), 3, dilation=12),
    Shapes(64, 64, (72, 72), 3, dilation=30),
    Shapes(16, 16, (72, 72), 3, dilation=12),
    Shapes(16, 16, (72, 72), 3, dilation=28),
    Shapes(3, 16, (72, 72), 3, dilation=28),
    Shapes(64, 64, (72, 72), 7, dilation=3),
    Shapes(32, 32, (72, 72), 13),
    Shapes(32, 32, (72, 72), 15),
    Shapes(32, 32, (72, 72), 19),
    Shapes(16, 16, (90, 90), 15),
    Shapes(16, 16, (72, 72), 21),
    Shapes(16, 8, (72, 72), 31),
    Shapes(3, 16, (72, 72), 31),
    Shapes(64, 64, (72, 72), 7, stride=2),
    Shapes(64, 64, (72, 72), 31, stride=4),
    Shapes(64, 64, (72, 72), 31, groups=64),
    Shapes(64, 64, (72, 72), 13, groups=64),
    Shapes(64, 64, (72, 72), 15, groups=64),
    Shapes(64, 64, (72, 72), 3, groups=64, dilation=12),
    Shapes(64, 64, (72, 72), 7, groups=64),
    Shapes(64, 64, (72, 72), 3, groups=64),
    Shapes(32, 32, (72, 72), 21, groups=2),
    Shapes(24, 24, (72, 72), 3, groups=4),
    Shapes(64, 64, (4096,), 7, dilation=9),
    Shapes(16, 16, (4000,), 15),
    Shapes(16, 16, (8, 16, 16), 3),
    Shapes(16, 16, (8, 16, 16), 3, dilation=2),
]


@pytest.mark.skipif(not IS_AVX512, reason="the rules of kernels for AVX-512")
@pytest.mark.parametrize("shapes", CASES, ids=str)
def test_kernels_with_columns_are_known(shapes: Shapes, capfd: Any) -> None:
    found = {direction: "gemm" in _kernel(shapes.call(direction), capfd) for direction in Direction}
    assert {direction: writes_columns(shapes.problem(direction)) for direction in Direction} == found


COUNTED = {
    Shapes(64, 64, (72, 72), 3, dilation=12): (2.5, 28.3, 5.2),
    Shapes(64, 64, (72, 72), 3, dilation=30): (2.5, 28.3, 12.1),
    Shapes(64, 64, (72, 72), 13): (5.2, 5.2, 5.1),
    Shapes(64, 64, (72, 72), 19): (8.2, 8.2, 37.6),
    Shapes(64, 64, (72, 72), 31): (2.5, 60.2, 87.2),
    Shapes(64, 64, (72, 72), 31, groups=64): (2.5, 2.8, 19.9),
    Shapes(64, 64, (72, 72), 31, groups=4): (2.5, 26.5, 27.6),
    Shapes(64, 64, (72, 72), 17, stride=2): (7.1, 6.2, 109.7),
    Shapes(512, 512, (28, 28), 3, stride=2): (12.1, 10.7, 9.0),
    Shapes(256, 512, (56, 56), 1, stride=2): (8.2, 12.3, 10.0),
}
"""MiB beside the result of the output and of the gradients of input and weight, as a counter of all blocks has shown;
by two threads, with AVX-512."""


@pytest.mark.skipif(not IS_AVX512, reason="counted with AVX-512")
@pytest.mark.parametrize("shapes", COUNTED, ids=str)
def test_memory_of_kernels_is_as_counted(shapes: Shapes) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        found = [copies_bytes(shapes.problem(direction)) / 2**20 for direction in Direction]
    finally:
        torch.set_num_threads(before)
    assert found == pytest.approx(COUNTED[shapes], rel=0.1, abs=0.3)
