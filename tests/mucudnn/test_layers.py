"""Patched torch against stock torch: every kind of layer, memory format, view and type."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from forced import Forced, divided, forced
from layer_cases import LAYERS, assert_same, results
from torch import nn
from torch.nn import functional

import mucudnn

ALGORITHMS = ("stock", "gemm", "fft")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("kind", LAYERS)
def test_every_kind_of_layer(kind: str, algorithm: str) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    module, x = build().double(), torch.randn(shape, dtype=torch.float64)
    expected = results(module, x)
    with mucudnn.patched(database=":memory:", board=Forced(algorithm)):
        assert_same(results(module, x), expected)
        assert_same(results(module, x), expected)  # the first call plans, the second only runs
        assert divided() == (0 if algorithm == "stock" and kind in ("unbatched", "one sample") else 3)


@pytest.mark.parametrize("channels_last", ["input", "weight", "both"])
@pytest.mark.parametrize("kind", ["2-D", "3-D", "strided", "depthwise", "1x1", "transposed 2-D", "transposed 3-D"])
def test_memory_formats_are_torchs(kind: str, channels_last: str) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[kind]
    module, x = build().double(), torch.randn(shape, dtype=torch.float64)
    memory_format = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
    if channels_last != "input":
        module = module.to(memory_format=memory_format)
    if channels_last != "weight":
        x = x.contiguous(memory_format=memory_format)
    expected = results(module, x)
    with forced("fft"):
        assert_same(results(module, x), expected)
        assert divided() == 3


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.transpose(2, 3),
    "expanded batch": lambda x: x[:1].expand(4, -1, -1, -1),
    "expanded channels": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "every second": lambda x: x[::2, :, ::2],
    "offset": lambda x: x[1:, :, 1:, 1:],
}


@pytest.mark.parametrize("algorithm", ["gemm", "fft"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_of_other_tensors(view: str, algorithm: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 3).double(), VIEWS[view](torch.randn(4, 3, 9, 9, dtype=torch.float64))
    expected = results(module, x)
    with forced(algorithm):
        assert_same(results(module, x), expected)
        assert divided() == 3


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, False, True)]
)
def test_gradients_of_any_subset(wanted: tuple[bool, ...]) -> None:
    def gradients() -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        tensors = [torch.randn(shape, dtype=torch.float64) for shape in ((4, 3, 9, 9), (4, 3, 3, 3), (4,))]
        for tensor, requires_grad in zip(tensors, wanted, strict=True):
            tensor.requires_grad_(requires_grad)
        functional.conv2d(*tensors).sin().sum().backward()
        return [tensor.grad for tensor in tensors]

    expected = gradients()
    with forced("fft"):
        for actual, gradient in zip(gradients(), expected, strict=True):
            assert (actual is None) == (gradient is None)
            if gradient is not None:
                torch.testing.assert_close(actual, gradient, rtol=1e-12, atol=1e-12)
        assert divided() == 1 + wanted[0] + wanted[1]  # the forward one too


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_weight_gradients_round_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 2, 12, 12).to(dtype), torch.randn(3, 2, 3, 3).to(dtype).requires_grad_()
    exact = w.detach().double().requires_grad_()
    functional.conv2d(x.double(), exact).sum().backward()
    for algorithm in ("gemm", "fft"):
        w.grad = None
        with forced(algorithm):
            functional.conv2d(x, w).sum().backward()
            assert divided() == 2
        spacing = torch.finfo(dtype).eps * exact.grad.abs()
        assert ((w.grad.double() - exact.grad).abs() <= 0.51 * spacing + 1e-4).all()


@pytest.mark.parametrize("algorithm", ["gemm", "fft"])
def test_deterministic_runs_are_bitwise_equal(algorithm: str) -> None:
    torch.manual_seed(0)
    module, x = nn.Conv2d(3, 4, 5, padding=2), torch.randn(7, 3, 33, 31)
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            with forced(algorithm):
                runs += [results(module, x), results(module, x)]
                assert divided() == 3
    finally:
        torch.use_deterministic_algorithms(False)
    for run in runs[1:]:
        assert all(torch.equal(run[name], tensor) for name, tensor in runs[0].items())
