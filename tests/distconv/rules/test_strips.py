"""A convolution in strips: torch's result, in a fraction of the memory, counted and traced as one operator."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from ranks import Ranks
from tensor_memory import TensorMemory
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import distconv
from distconv.rules.convolution import kernels
from distconv.rules.convolution.strips import STRIP, rows_of_strips
from mucudnn.convolution.problem import Dim

CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "image": ((1, 16, 130, 130), (8, 16, 3, 3), {"padding": 1}),
    "two images": ((2, 16, 66, 130), (8, 16, 3, 3), {"padding": (0, 1)}),
    "stride": ((1, 32, 131, 131), (4, 32, 5, 5), {"padding": 2, "stride": (3, 2)}),
    "groups": ((1, 32, 130, 130), (8, 16, 3, 3), {"padding": 1, "groups": 2}),
    "volume": ((1, 8, 12, 24, 40), (8, 8, 3, 3, 3), {"padding": 1}),
    "deep volume": ((1, 8, 48, 12, 24), (8, 8, 3, 3, 3), {"padding": (1, 0, 1)}),
}
"""By name: the shapes of input and weight, and the other arguments."""


def arguments(dims: int, stride: Any = 1, padding: Any = 0, groups: int = 1) -> Any:
    """Those of `aten::convolution`."""
    sizes = ((value,) * dims if isinstance(value, int) else value for value in (stride, padding, 1))
    return *sizes, False, (0,) * dims, groups


@pytest.mark.parametrize("name", CASES)
def test_strips_give_torchs_result_in_less_memory(name: str) -> None:
    shape, weight, options = CASES[name]
    rest = arguments(len(shape) - 2, **options)
    rows = rows_of_strips(shape, weight, torch.float64, rest)
    assert rows is not None
    assert rows[0] == (Dim.DEPTH if name == "deep volume" else Dim.HEIGHT)
    x, w, bias = (torch.randn(sizes, dtype=torch.float64) for sizes in (shape, weight, weight[:1]))
    with torch.no_grad():
        right = torch.convolution(x, w, bias, *rest)
        with TensorMemory() as memory, FlopCounterMode(display=False) as once:
            found = kernels.local_convolution(False, x, w, bias, rest)
        with FlopCounterMode(display=False) as by_torch:
            torch.convolution(x, w, bias, *rest)
    assert float((found - right).abs().max()) < 1e-12
    assert found.is_contiguous()
    # Beside a strip's written out operands: the rows that it reads, with their padding, and its result.
    assert memory.peak < found.nbytes + 2 * STRIP
    assert once.get_total_flops() == by_torch.get_total_flops()


@pytest.mark.parametrize(
    ("shape", "weight", "dtype"),
    [
        ((1, 16, 40, 40), (8, 16, 3, 3), torch.float64),  # small
        ((1, 64, 256, 256), (64, 64, 1, 1), torch.float64),  # nothing to write out
        ((1, 64, 1 << 16), (64, 64, 3), torch.float64),  # no rows
        ((1, 64, 128, 128), (64, 64, 3, 3), torch.float32),  # computed by oneDNN
        ((1, 64, 128, 128), (64, 64, 3, 3), torch.complex128),
    ],
)
def test_other_convolutions_are_torchs(shape: tuple[int, ...], weight: tuple[int, ...], dtype: torch.dtype) -> None:
    assert rows_of_strips(shape, weight, dtype, arguments(len(shape) - 2)) is None


def test_operator_keeps_the_rules_of_torch() -> None:
    shape, weight, options = CASES["volume"]
    rest = arguments(3, **options)
    rows = rows_of_strips(shape, weight, torch.float64, rest)
    assert rows is not None
    x, w = (torch.randn(sizes, dtype=torch.float64) for sizes in (shape, weight))
    stride, padding, dilation, _, _, groups = rest
    given = x, w, None, stride, padding, dilation, groups, *rows
    torch.library.opcheck(torch.ops.distconv.convolution_in_strips.default, given)


def step(partition: str, backend: str | None) -> list[float]:
    """The largest relative errors of output and gradients of a layer beside one process."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(3)
    plain, x = nn.Conv3d(8, 8, 3, padding=1).double(), torch.randn(2, 8, 24, 24, 40, dtype=torch.float64)
    alone, z = copy.deepcopy(plain), x.clone().requires_grad_()
    y = alone(z)
    grad = torch.randn_like(y)
    y.backward(grad)
    model: Any = distconv.parallelize(plain, mesh)
    model = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
    own = distconv.shard(x, mesh).requires_grad_()
    with mock.patch.object(kernels, "in_strips", wraps=kernels.in_strips) as computed:
        made = model(own)
    assert computed.called
    made.backward(distconv.shard(grad, mesh))
    found = [distconv.gather(each) for each in (made.detach(), own.grad, plain.weight.grad, plain.bias.grad)]
    right = [y.detach(), z.grad, alone.weight.grad, alone.bias.grad]
    return [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True)]


@pytest.mark.gloo
@pytest.mark.parametrize(("partition", "backend"), [("height=2", None), ("sample=2", None), ("height=2", "aot_eager")])
def test_a_ranks_part_may_be_computed_in_strips(
    ranks: Callable[[int], Ranks], partition: str, backend: str | None
) -> None:
    for errors in ranks(2).run(step, partition, backend):
        assert max(errors) < 1e-12
