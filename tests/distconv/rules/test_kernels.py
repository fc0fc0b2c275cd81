"""A rank's part of a convolution takes the kernel that torch takes for the whole, and its memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from tensor_memory import TensorMemory
from torch import Tensor, nn

import distconv
from distconv.rules.convolution.kernels import local_convolution, local_gradients
from mucudnn.devices.allocations import peak_bytes

CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "volume, more channels than filters": (lambda: nn.Conv3d(32, 16, 3, padding=1), (1, 32, 32, 32, 12)),
    "volume": (lambda: nn.Conv3d(16, 32, 3, padding=1), (1, 16, 40, 40, 12)),
    "two samples": (lambda: nn.Conv3d(16, 24, 3, padding=1), (2, 16, 28, 28, 12)),
}
"""Convolutions that torch hands to oneDNN as a whole, but not in halves."""


def gradients(model: nn.Module, plain: nn.Module, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output and gradients, whole."""
    x.grad = None
    plain.zero_grad()
    y = model(x)
    y.backward(grad)
    found = [y.detach(), x.grad, *(parameter.grad for parameter in plain.parameters())]
    return [distconv.gather(value).clone() for value in found]


def measured(name: str, partition: str, backend: str | None) -> tuple[float, float]:
    """(largest relative error beside one process in float64, peak memory of a step over the bytes of x and y)."""
    build, shape = CASES[name]
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(3)
    plain, x = build(), torch.randn(shape)
    exact = copy.deepcopy(plain).double()
    with torch.no_grad():
        grad = torch.randn_like(plain(x))
    right = gradients(exact, exact, x.double().requires_grad_(), grad.double())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = distconv.parallelize(plain, mesh)
        model = model if backend is None else torch.compile(model, backend=backend, fullgraph=True)
        own, own_grad = distconv.shard(x, mesh).requires_grad_(), distconv.shard(grad, mesh)
        found = gradients(model, plain, own, own_grad)
        with TensorMemory() as memory:
            own.grad = None
            model(own).backward(own_grad)
    finally:
        torch.set_num_threads(threads)
    errors = [float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, right, strict=True)]
    return max(errors), memory.peak / (own.to_local().nbytes + own_grad.to_local().nbytes)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "name, partition, backend",
    [(name, "sample=2" if name == "two samples" else "height=2", None) for name in CASES]
    + [("volume, more channels than filters", "height=2", "aot_eager")],
)
def test_part_takes_the_kernel_of_the_whole(
    ranks: Callable[[int], Ranks], name: str, partition: str, backend: str | None
) -> None:
    for error, memory in ranks(2).run(measured, name, partition, backend):
        assert error < 1e-5
        # The kernel for small samples alone takes as many copies of x as its kernel has elements.
        assert memory < 5


@pytest.mark.parametrize("depth, padding", [(2, 2), (1, 1), (2, 1)])
def test_a_slab_thinner_than_the_kernel_takes_no_columns(depth: int, padding: int) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1, 64, depth, 32, 32), torch.randn(32, 64, 3, 3, 3)
    arguments: Any = [1, 1, 1], [padding, 1, 1], [1, 1, 1], False, [0, 0, 0], 1
    right = torch.convolution(x.double(), w.double(), None, *arguments)
    grad = torch.randn(right.shape)
    back = torch.ops.aten.convolution_backward.default
    found = [
        local_convolution(True, x, w, None, arguments),
        *local_gradients(True, grad, x, w, arguments, True, False),
        *local_gradients(True, grad, x, w, arguments, False, True),
    ]
    rights = right, *back(grad.double(), x.double(), w.double(), None, *arguments, [True, True, False])[:2]
    for each, other in zip([y for y in found if y is not None], rights, strict=True):
        assert each.shape == other.shape and (each - other).abs().max() < 1e-5 * other.abs().max()
    compute = functools.partial(local_gradients, True, grad, x, w, arguments, True, False)
    assert peak_bytes(compute, torch.device("cpu")) < 5 << 20  # columns: 7 to 28 MiB
