"""What kernels of norms and recurrent layers take beside their tensors, as torch's allocator counts it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distconv.turns.scratch import scratch_bytes
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


@pytest.mark.parametrize("asked", ["x", "w", "y"])
@pytest.mark.parametrize("channels", [1, 16, 20])
def test_copies_of_onednn_are_known(asked: str, channels: int) -> None:
    """As a counter of all allocations has shown them, which torch's allocator is not."""
    shape, weight = (1, channels, 6, 32, 32), (16, channels, 3, 3, 3)
    x, w, y = torch.randn(shape), torch.randn(weight), torch.randn(1, 16, 4, 32, 32)
    tensors = {"x": x, "w": w, "y": y}
    target = tensors[asked]
    given = [None if name == asked else each for name, each in tensors.items()]
    blocked = (0 if channels == 1 and given[0] is not None else -(-channels // 16) * 16 * 6) + 16 * 4
    copied = sum(each.numel() for each in (given[0], given[2]) if each is not None)
    arguments = *given, None, list(target.shape), [0, 1, 1], 1
    found = scratch_bytes(torch.ops.distconv.onednn_convolution.default, arguments, [target])
    assert found == 4 * (blocked * 32 * 32 + copied + w.numel())
