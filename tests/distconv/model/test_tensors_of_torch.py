"""Tensors of other kinds than distributed ones, made within a model: nested ones, and those without numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, aot_module

import distconv

pytestmark = pytest.mark.gloo


class Bags(nn.Module):
    """The mean over nested tensors of an image's positions; ``whole`` makes an activation whole."""

    def __init__(
        self, nested: Callable[[list[Tensor]], Tensor], whole: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.nested, self.whole = nn.Conv2d(3, 8, 3, padding=1).double(), nested, whole or (lambda y: y)

    def forward(self, x: Tensor) -> Any:
        y = self.whole(self.layer(x).flatten(2).transpose(1, 2))
        return sum(part.square().mean() for part in self.nested([y[0], y[1, :5]]).unbind())


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged)


def images() -> Tensor:
    return torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Compiled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3, padding=1).double()
        self.function = aot_function(lambda y: y.sin() * 2, lambda graph, _: graph)

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def refusals(partition: str) -> list[str]:
    mesh, found = distconv.init(partition, device_type="cpu"), []
    with distconv.distributed_script(mesh):
        ahead: Any = aot_module
        for net in (
            Bags(torch.nested.nested_tensor),
            Bags(jagged),
            Compiled(),
            ahead(Compiled(), lambda graph, _: graph),
        ):
            with pytest.raises(distconv.UnsupportedOperation) as caught:
                net(images())
            found.append(str(caught.value))
    return found


def trained(partition: str | None) -> list[Tensor]:
    if partition is None:
        net = Bags(jagged)
        net(images()).backward()
        return [parameter.grad for parameter in net.parameters()]  # type: ignore[misc]
    with distconv.distributed_script(distconv.init(partition, device_type="cpu")):
        net = Bags(jagged, distconv.gather)
        net(images()).backward()
        return distconv.whole_state([parameter.grad for parameter in net.parameters()])


@pytest.mark.parametrize("partition", ["sample=2", "channel=2"])
def test_nested_tensors_of_whole_ones(ranks: Callable[[int], Ranks], partition: str) -> None:
    for found in ranks(2).run(trained, partition):
        torch.testing.assert_close(found, trained(None), rtol=1e-10, atol=1e-12)


def test_other_kinds_are_refused_in_one_line(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(refusals, "height=2")
    assert first == second
    for found, begins in zip(
        first, ("torch.nested.nested_tensor", "torch.nested.as_nested_tensor", "Compiled", "AOT"), strict=True
    ):
        assert found.startswith(begins)
        assert "accepted: " in found
        assert "\n" not in found
