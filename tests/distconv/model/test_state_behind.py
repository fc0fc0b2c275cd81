"""Parameters that are changed behind their use in a call, which backward then reads; and changes past torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import data_behind
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


def trained(change: Callable[..., None], frozen: bool, hooked: bool) -> dict[str, Tensor]:
    """What two steps find, where a layer's weight is changed before backward, or each one's in a forward hook, too."""
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
        if hooked:
            layer.register_forward_hook(change)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    found: dict[str, Tensor] = {}
    for step in range(2):
        x = torch.randn(2, 2, 8, 8, generator=torch.Generator().manual_seed(step), requires_grad=True)
        loss = (net(x * 1.0) * net(x * 2.0)).mean()
        change(net[step])
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
        for frozen, hooked in ((False, False), (False, True), (True, True)):
            expected = trained(change, frozen, hooked)
            for partition in PARTITIONS:
                with distconv.distributed_script(distconv.init(partition, device_type="cpu")):
                    here = {name: distconv.gather(value) for name, value in trained(change, frozen, hooked).items()}
                names = [k for k, v in expected.items() if k not in here or not torch.allclose(v, here[k], 1e-9, 1e-11)]
                if names or here.keys() != expected.keys():
                    wrong[f"{change.__name__}, frozen {frozen}, hooked {hooked}, {partition}"] = names
    return wrong


def put_into_dict(layer: Any) -> None:
    vars(layer)["_parameters"]["weight"] = nn.Parameter(layer.weight.detach() * 0.5)


def by_array(layer: Any) -> None:
    layer.weight.detach().numpy()[0] *= 0.5


def by_exchange(layer: Any) -> None:
    torch.from_dlpack(layer.weight.detach()).mul_(0.5)


def by_storage(layer: Any) -> None:
    storage = layer.weight.untyped_storage()
    storage.copy_(torch.ones(storage.nbytes(), dtype=torch.uint8).untyped_storage())


def by_kept_array(layer: Any) -> None:
    layer.array[0] *= 0.5


def by_kept_data(layer: Any) -> None:
    layer.kept.mul_(0.5)


def by_method(layer: Any) -> None:
    layer.bias.data.add_(0)
    layer.left(0.5)


def by_shared_data(layer: Any) -> None:
    layer.back.weight.data = layer.weight.data


def by_buffer(layer: Any) -> None:
    layer.mean.data = layer.bias.data


PUT = "parameter 0.weight of Sequential was put into the module's dict"

KEPT = by_kept_data, by_method, by_shared_data, by_buffer

SPLIT = {
    by_array: "parameter 0.weight of Sequential was ",
    by_exchange: "parameter 0.weight of Sequential was ",
    by_storage: "parameter 0.weight of Sequential was written to, by no function of torch on it, while",
    by_method: "parameter 0.bias of Sequential was written to, by no function of torch on it, while the model ran",
    by_buffer: ".data = ... of a tensor (4,): the value (4,) has the memory of a parameter or buffer in another layout",
}
"""What is refused of a parameter in shards: its memory is not what the model has written to."""


class Unseen(nn.Conv2d):
    """Changes a parameter or a buffer past torch, before and after its use, and another one by `.data`."""

    bias: Any
    back: Any
    left: Any
    count: Any
    mean: Any

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__(2, 4, 3, padding=1)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("count", torch.zeros(()))
        self.back = nn.ConvTranspose2d(4, 2, 3, padding=1)
        self.array, self.left, self.change = self.mean.numpy(), self.bias.data.mul_, change
        if change is by_kept_data:
            self.kept = self.bias.data

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        self.count.data.add_(1)
        y = super().forward(x) * self.mean.view(-1, 1, 1)
        self.change(self)
        return self.back(y)


def stepped(change: Callable[[Any], None]) -> dict[str, Tensor]:
    """What two steps find."""
    torch.manual_seed(0)
    net = nn.Sequential(Unseen(change), nn.ReLU())
    x = torch.randn(2, 2, 8, 8, requires_grad=True)
    found: dict[str, Tensor] = {}
    for step in range(2):
        loss = net(x * 1.0).square().mean()
        loss.backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.sub_(parameter.grad)  # type: ignore[arg-type]
        found[f"loss {step}"] = loss.detach()
    return found | {"input": x.grad, **net.state_dict()}  # type: ignore[dict-item]


class Chosen(nn.Module):
    """Takes channels in another order, after which each rank has all of them."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, torch.tensor([1, 0, 3, 2])] * 2.0


def behind_a_copy() -> str:
    """What backward raises where a weight was changed since, of which the layer has read a copy in another layout."""
    net = nn.Sequential(nn.Conv2d(2, 4, 3), Chosen(), nn.Conv2d(4, 4, 3), nn.ReLU())
    with distconv.distributed_script(distconv.init("channel=2", device_type="cpu")):
        loss = net(torch.randn(2, 2, 8, 8, requires_grad=True)).square().mean()
        net[2].weight.data.mul_(2.0)
        try:
            loss.backward()
        except RuntimeError as error:
            return str(error)
    return "nothing"


def past_torch() -> dict[str, Any]:
    """What is not as in one process, or said something else."""
    torch.set_default_dtype(torch.float64)
    wrong: dict[str, Any] = {}
    if "inplace" not in (said := behind_a_copy()):
        wrong["a copy"] = said
    for partition in PARTITIONS:
        with distconv.distributed_script(distconv.init(partition, device_type="cpu")):
            here = {name: distconv.gather(x) for name, x in data_behind.gradients().items()}
        for name, x in data_behind.gradients().items():
            if not torch.allclose(x, here[name], 1e-9, 1e-11):
                wrong[f"buffers, {partition}, {name}"] = x, here[name]
        for change in (put_into_dict, by_array, by_exchange, by_storage, by_kept_array, *KEPT):
            expected = PUT if change is put_into_dict else SPLIT.get(change) if partition == "channel=2" else None
            right = stepped(change) if expected is None else {}
            try:
                with distconv.distributed_script(distconv.init(partition, device_type="cpu")):
                    here = {name: distconv.gather(value) for name, value in stepped(change).items()}
                said: Any = [name for name, x in right.items() if not torch.allclose(x, here[name], 1e-9, 1e-11)]
            except UnsupportedOperation as error:
                said = str(error).splitlines()[0]
            if said if expected is None else not str(said).startswith(expected):
                wrong[f"{change.__name__}, {partition}"] = said
    return wrong


def test_backward_reads_what_was_written_behind_the_use(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(unlike) == [{}] * 2


def test_what_is_written_past_torch_counts_or_is_refused(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(past_torch) == [{}] * 2
