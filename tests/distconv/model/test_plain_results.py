"""Small results of a script's models are plain tensors, whose gradients go back to the shards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

import distconv
from distconv.model import running
from distconv.model.parallelize import distributed_script

pytestmark = pytest.mark.gloo

PARTITIONS = ["sample=2,height=2", "sample=2,channel=2", "filter=2,width=2"]


class Network(nn.Module):
    """Whose results are a map of scores, one of them twice, and a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 2, 1))

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layers(x)
        return {"scores": y, "again": [y], "loss": y.square().mean()}


def trained(partition: str | None) -> list[Tensor]:
    """The parameters after two steps whose loss differentiates twice."""
    torch.manual_seed(2)
    model, x, target = Network().double(), torch.randn(4, 2, 8, 6).double(), torch.randint(2, (4, 8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def steps() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            found = model(x.requires_grad_())
            if partition is not None:
                kinds = [type(found[name]) for name in ("scores", "loss")]
                assert kinds == [Tensor, Tensor] and found["again"][0] is found["scores"]
            slope = torch.autograd.grad(found["scores"].sin().sum(), x, create_graph=True)[0]
            loss = nn.functional.cross_entropy(found["scores"], target) + found["loss"] + slope.square().mean()
            (loss * found["again"][0].sigmoid().mean()).backward()
            optimizer.step()

    if partition is None:
        steps()
    else:
        running.LARGEST_PLAIN = 1 << 16
        with distributed_script(distconv.init(partition, device_type="cpu")):
            steps()
    return distconv.whole_state([parameter.detach() for parameter in model.parameters()])


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_is_computed_of_plain_results_trains_as_in_one_process(
    ranks: Callable[[int], Ranks], partition: str
) -> None:
    for found in ranks(4).run(trained, partition):
        torch.testing.assert_close(found, trained(None), rtol=1e-10, atol=1e-10)


BOX = torch.ones(1, 1, 3, 3).double() / 9

TERMS: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": lambda x: F.conv2d(x, BOX, padding=1),
    "convolution of one dim": lambda x: F.conv1d(x.flatten(2), BOX[:, :, 0]),
    "transposed convolution": lambda x: F.conv_transpose2d(x, BOX, stride=2),
    "convolution in groups": lambda x: F.conv2d(x.repeat(1, 2, 1, 1), BOX.repeat(2, 1, 1, 1), groups=2),
    "maximum": lambda x: F.max_pool2d(x, 3, 2),
    "mean": lambda x: F.avg_pool2d(x, 3, 2),
    "adaptive maximum": lambda x: F.adaptive_max_pool2d(x, 3),
    "resize": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "gradient of a convolution": lambda x: torch.autograd.grad(F.conv2d(x, BOX).pow(3).sum(), x, create_graph=True)[0],
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True).pow(3),
}
"""What a loss may compute of a small result."""


def gradients_of_mixed_losses(partition: str | None) -> list[Tensor]:
    """Of losses that add a term of a plain result to one of a distributed result, and multiply the two."""
    torch.manual_seed(2)
    model, x = nn.Conv2d(2, 3, 3, padding=1).double(), torch.randn(2, 2, 12, 10).double()
    model.register_forward_hook(lambda _, given, y: (y.square().sum(1, keepdim=True), y))
    running.LARGEST_PLAIN = 2 * 12 * 10 * 8
    mesh = None if partition is None else distconv.init(partition, device_type="cpu")
    found = []
    with contextlib.nullcontext() if mesh is None else distributed_script(mesh):
        for term in TERMS.values():
            small, large = model(x)
            assert mesh is None or (type(small), type(large)) == (Tensor, DTensor)
            loss = term(small).square().mean() + large.diff(dim=2).square().mean() + (small * large).mean()
            found += torch.autograd.grad(loss, list(model.parameters()))
    return distconv.whole_state(found)


@pytest.mark.parametrize("partition", ["sample=2,height=2", "sample=2,channel=2"])
def test_a_loss_of_plain_and_distributed_results(ranks: Callable[[int], Ranks], partition: str) -> None:
    for found in ranks(4).run(gradients_of_mixed_losses, partition):
        torch.testing.assert_close(found, gradients_of_mixed_losses(None), rtol=1e-10, atol=1e-10)


def kinds_of_results(partition: str) -> list[bool]:
    """Whether results are plain: one just small enough, one that is not, and one without gradients."""
    running.LARGEST_PLAIN = 1 << 16
    found = []
    with distributed_script(distconv.init(partition, device_type="cpu")):
        model = nn.Conv2d(1, 1, 1)
        found += [type(model(torch.zeros(1, 1, 128, width))) is Tensor for width in (128, 129)]
        with torch.no_grad():
            found.append(type(model(torch.zeros(1, 1, 8, 8))) is Tensor)
    return found


def test_which_results_are_plain(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(kinds_of_results, "height=2") == [[True, False, True]] * 2
