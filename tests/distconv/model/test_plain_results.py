"""Small results of a script's models are plain tensors, whose gradients go back to the shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import distconv
from distconv.model import results
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
        results.LARGEST_PLAIN = 1 << 16
        with distributed_script(distconv.init(partition, device_type="cpu")):
            steps()
    return distconv.whole_state([parameter.detach() for parameter in model.parameters()])


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_is_computed_of_plain_results_trains_as_in_one_process(
    ranks: Callable[[int], Ranks], partition: str
) -> None:
    for found in ranks(4).run(trained, partition):
        torch.testing.assert_close(found, trained(None), rtol=1e-10, atol=1e-10)


def kinds_of_results(partition: str) -> list[bool]:
    """Whether results are plain: one just small enough, one that is not, and one without gradients."""
    results.LARGEST_PLAIN = 1 << 16
    found = []
    with distributed_script(distconv.init(partition, device_type="cpu")):
        model = nn.Conv2d(1, 1, 1)
        found += [type(model(torch.zeros(1, 1, 128, width))) is Tensor for width in (128, 129)]
        with torch.no_grad():
            found.append(type(model(torch.zeros(1, 1, 8, 8))) is Tensor)
    return found


def test_which_results_are_plain(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(kinds_of_results, "height=2") == [[True, False, True]] * 2
