"""New tensors that a model fills by slices: parts of them lie as what is written, and nobody makes them whole."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import distconv
from distconv.model.direct.written_layout import written_layout

X = torch.randn(1, 4, 128, 96, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class _Largest(TorchDispatchMode):
    """Keeps the most elements of a plain tensor that an operator makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if type(result) is Tensor and not result.is_meta and any(result.stride()):
            self.elements = max(self.elements, result.numel())
        return result


class Filled(nn.Module):
    def __init__(self, fill: Callable[[Tensor], Tensor], channels: int) -> None:
        super().__init__()
        self.fill, self.first, self.last = fill, nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(channels, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.fill(self.first(x)))


def by_channels(x: Tensor) -> Tensor:
    z = torch.zeros(1, 12, 128, 96)
    z[:, :4], z[:, 4:8] = x, x.roll(1, 3)
    z[:, 8:].sub_(x)
    return z


def by_views(x: Tensor) -> Tensor:
    z = torch.ones_like(torch.empty(3, 128, 96, 4))
    z.narrow(0, 2, 1).fill_(0.5)
    z.permute(0, 3, 1, 2)[0].copy_(x[0])
    z.permute(0, 3, 1, 2)[1, :2] = x[0, 2:]
    return z.permute(0, 3, 1, 2).reshape(1, 12, 128, 96)


def as_spectrum(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x)
    z = spectrum.new_zeros(1, 12, 128, 49)
    z[:, 2:6, :, :9] = spectrum[..., :9]
    return torch.fft.irfft(z)


@pytest.mark.parametrize("fill", [by_channels, by_views, as_spectrum])
@pytest.mark.parametrize("memory", [None, "256KiB"])
def test_parts_fill_their_own(fill: Callable[[Tensor], Tensor], memory: str | None) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        plain = Filled(fill, 12)
        turned = distconv.in_turn(copy.deepcopy(plain), "height=4", memory=memory)
        with _Largest() as largest, torch.no_grad():
            turned(X)
        results = [model(X) for model in (turned, plain)]
    finally:
        torch.set_default_dtype(torch.float32)
    assert largest.elements <= 12 * 128 * 96 // 2
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)
    for result in results:
        result.square().sum().backward()
    for one, other in zip(turned.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-9)


def test_layouts_of_what_is_written() -> None:
    every = slice(None)

    def layout(shape: tuple[int, ...], index: Any, dim: int, written: tuple[int, ...], *views: Any) -> Any:
        found = written_layout(shape, views, index, (Shard(dim), Replicate()), written)
        return None if found is None else found[0]

    cases: list[tuple[Placement | None, Placement | None]] = [
        (layout((2, 8, 5, 6), (every, slice(1, 5)), 2, (2, 4, 5, 6)), Shard(2)),
        (layout((2, 8, 9, 5, 6), (every, every, 3, every, slice(2, None)), 2, (2, 8, 5, 4)), Shard(3)),
        (layout((2, 8, 5, 6), ..., 0, (5, 6)), Shard(2)),
        (layout((2, 8, 5, 6), (0, every, None), 3, (8, 1, 5, 6)), Shard(3)),
        (layout((2, 5, 6, 8), (), 1, (2, 8, 5, 6), lambda x: x.permute(0, 3, 1, 2)), Shard(3)),
        (layout((9, 5, 6), (every, every, slice(None, None, 3)), 2, (9, 5, 2)), Shard(2)),
        (layout((2, 8, 5, 6), (every, torch.tensor([3, 4])), 1, (2, 2, 5, 6)), None),
        (layout((2, 8, 5, 6), (every, torch.arange(8) > 5), 2, (2, 2, 5, 6)), Shard(2)),
        (layout((2, 8, 5, 6), (every, slice(0, 1)), 1, (2, 4, 5, 6)), None),
    ]
    assert [found for found, _ in cases] == [expected for _, expected in cases]


def test_outside_of_a_call_they_are_plain() -> None:
    distconv.in_turn(nn.Conv2d(1, 1, 1), "height=2")
    assert type(torch.zeros(1 << 18)) is type(X.new_full((1 << 18,), 1)) is type(torch.empty_like(X)) is Tensor


def test_a_default_device_holds_for_all_functions() -> None:
    distconv.in_turn(nn.Conv2d(1, 1, 1), "height=2")
    with torch.device("meta"):
        made = [make([1.0]) for make in (torch.tensor, torch.as_tensor, torch.asarray)]
        assert all(x.is_meta for x in (*made, torch.zeros(1), torch.full((1,), 2.0)))
