"""Convolutions of complex numbers, within a script's model: as in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import distconv
from distconv.model.parallelize import distributed_script

pytestmark = pytest.mark.gloo


def numbers(partition: str | None) -> list[Tensor]:
    """The loss of a network of a spectrum, and its gradients."""
    torch.manual_seed(5)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, dtype=torch.cdouble),
        nn.ConvTranspose2d(4, 4, 3, stride=2, dtype=torch.cdouble),
        nn.Conv2d(4, 2, 3, groups=2, padding=1, padding_mode="circular", bias=False, dtype=torch.cdouble),
    )
    x = torch.fft.fft2(torch.rand(2, 2, 8, 6, dtype=torch.float64), norm="ortho")
    mesh = None if partition is None else distconv.init(partition, device_type="cpu")
    with contextlib.nullcontext() if mesh is None else distributed_script(mesh):
        loss = net(x).abs().mean()
        grads = torch.autograd.grad(loss, list(net.parameters()))
    return distconv.whole_state([torch.view_as_real(y.resolve_conj()) for y in grads] + [loss.detach()])


@pytest.mark.parametrize("partition", ["height=2", "channel=2"])
def test_complex_convolutions_equal_one_process(ranks: Callable[[int], Ranks], partition: str) -> None:
    for found in ranks(2).run(numbers, partition):
        torch.testing.assert_close(found, numbers(None), rtol=1e-10, atol=1e-12)
