"""Parameters that are changed behind their use in a call, which backward then reads; and changes that nothing sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn

import distconv
from distconv.tensors.refusal import UnsupportedOperation

pytestmark = pytest.mark.gloo

PARTITIONS = ["height=2", "sample=2", "channel=2"]


def assigned(layer: Any, *_: Any) -> None:
    layer.weight.data = layer.weight.data * 0.5 + 0.25


def in_place(layer: Any, *_: Any) -> None:
    layer.weight.data.mul_(0.5).add_(0.25)


def trained(change: Callable[..., None], frozen: bool) -> dict[str, Tensor]:
    """What two steps find, where each layer's weight is changed in a forward hook."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding="same"),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.BatchNorm2d(4),
        nn.ConvTranspose2d(4, 2, 2, stride=2),
        nn.InstanceNorm2d(2, affine=True),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
    )
    for layer in net:
        layer.weight.requires_grad_(not frozen)
        layer.register_forward_hook(change)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found: dict[str, Tensor] = {}
    for step in range(2):
        x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(step), requires_grad=True)
        loss = net(x * 1.0).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found |= {f"loss {step}": loss, f"input {step}": x.grad}  # type: ignore[dict-item]
        found |= {f"gradient {step} of {name}": p.grad for name, p in net.named_parameters() if p.grad is not None}
    found |= dict(net.state_dict())
    return {name: value.detach().clone() for name, value in found.items()}


def unlike() -> dict[str, list[str]]:
    """What is not what one process finds."""
    torch.set_default_dtype(torch.float64)
    wrong: dict[str, list[str]] = {}
    for change in (assigned, in_place):
        for frozen in (False, True):
            expected = trained(change, frozen)
            for partition in PARTITIONS:
                with distconv.distributed_script(distconv.init(partition, device_type="cpu")):
                    here = {name: distconv.gather(value) for name, value in trained(change, frozen).items()}
                names = [k for k, v in expected.items() if k not in here or not torch.allclose(v, here[k], 1e-9, 1e-11)]
                if names or here.keys() != expected.keys():
                    wrong[f"{change.__name__}, frozen {frozen}, {partition}"] = names
    return wrong


class Unseen(nn.Conv2d):
    """Puts another parameter into its dict, past `nn.Module`."""

    def forward(self, x: Tensor) -> Tensor:
        vars(self)["_parameters"]["weight"] = nn.Parameter(self.weight.detach() * 0.5)
        return super().forward(x)


def refused() -> list[str]:
    """The first lines of errors."""
    found = []
    for partition in PARTITIONS:
        torch.manual_seed(0)
        with distconv.distributed_script(distconv.init(partition, device_type="cpu")):
            net = nn.Sequential(Unseen(2, 4, 3, padding=1), nn.ReLU())
            with pytest.raises(UnsupportedOperation) as error:
                net(torch.randn(2, 2, 8, 8))
            found.append(str(error.value).splitlines()[0])
    return found


def test_backward_reads_what_was_written_behind_the_use(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(unlike) == [{}] * 2


def test_a_parameter_that_nothing_has_seen_is_refused(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(refused):
        assert all(line.startswith("parameter 'weight' (4, 2, 3, 3) of Unseen was put into") for line in found), found
