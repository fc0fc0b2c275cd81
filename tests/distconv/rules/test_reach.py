"""Gradients of filters that reach far beyond what a rank has: x and dL/dy swapped, and some channels at a time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import distconv
from distconv.rules.convolution import local
from mucudnn.process import substituted

SIZES = st.integers(1, 4)


def gradients(layer: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    layer(x).backward(grad)
    return [x.grad, *(parameter.grad for parameter in layer.parameters())]


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_few_rows_beside_a_large_reach(data: Any) -> None:
    dims = data.draw(st.integers(1, 3))
    kernel, dilation = ([data.draw(SIZES) for _ in range(dims)] for _ in range(2))
    padding = [data.draw(st.integers(0, d * (k - 1))) for d, k in zip(dilation, kernel, strict=True)]
    space = [d * (k - 1) + data.draw(st.integers(4, 9)) for d, k in zip(dilation, kernel, strict=True)]
    make = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    layer = make(3, 5, kernel, padding=padding, dilation=dilation).double()
    x = torch.randn(2, 3, *space).double()
    with torch.no_grad():
        grad = torch.randn_like(layer(x))
    axis = ("width", "height", "depth")[dims - 1]
    parts = data.draw(st.sampled_from([f"{axis}=4", f"{axis}=2", "width=3"]))
    net = distconv.in_turn(copy.deepcopy(layer), parts)
    with substituted(local, ONE_CALL=data.draw(st.sampled_from([0, local.ONE_CALL]))):
        found = gradients(net, x, grad)
    for own, right in zip(found, gradients(layer, x, grad), strict=True):
        torch.testing.assert_close(own, right, rtol=1e-10, atol=1e-10)


def test_both_are_swapped_where_most_of_x_would_be_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    positions: list[int] = []
    gradients_of = local.kernels.local_gradients

    def watched(onednn: bool, grad: Tensor, *rest: Any) -> Any:
        if rest[-1]:  # of the filter
            positions.append(grad.shape[2])
        return gradients_of(onednn, grad, *rest)

    monkeypatch.setattr(local, "ONE_CALL", 0)
    monkeypatch.setattr(local.kernels, "local_gradients", watched)
    layer, x = nn.Conv2d(4, 4, 3, padding=8, dilation=8).double(), torch.randn(1, 4, 32, 8).double()
    for dilation, of_filter in ((8, 8), (1, 10)):  # of 8 rows of x, or of 10 of dL/dy for 8 of x
        layer.dilation = layer.padding = (dilation, dilation)
        positions.clear()
        gradients(distconv.in_turn(copy.deepcopy(layer), "height=4"), x, torch.ones(1, 4, 32, 8).double())
        assert of_filter in positions and (dilation == 1 or max(positions) == of_filter)


@pytest.mark.parametrize("channels", [48, 40])
def test_some_channels_at_a_time_where_columns_are_large(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "AT_ONCE", 1 << 10)
    monkeypatch.setattr(local, "FEWEST", 16)
    counts: list[int] = []
    gradients_of = local.kernels.local_gradients

    def watched(onednn: bool, grad: Tensor, x: Tensor, *rest: Any) -> Any:
        if rest[-1]:  # of the filter: that of x, beside rows of zeros, needs no columns
            counts.append(x.shape[1])
        return gradients_of(onednn, grad, x, *rest)

    monkeypatch.setattr(local.kernels, "local_gradients", watched)
    layer = nn.Conv2d(channels, 8, 3, padding=30, dilation=30).float()
    x = torch.randn(2, channels, 64, 320).float()
    grad = torch.randn(2, 8, 64, 320).float()
    exact = gradients(copy.deepcopy(layer).double(), x.double(), grad.double())
    found = gradients(distconv.in_turn(layer, "width=2"), x, grad)
    assert max(counts) == 16
    for own, right in zip(found, exact, strict=True):
        torch.testing.assert_close(own.double(), right, rtol=1e-4, atol=1e-3)
