"""Models that read and write their own parameters while they compute: every way of doing so, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import distconv
from distconv.model import fully_sharded

pytestmark = pytest.mark.gloo


class Layer(nn.Conv2d):
    """A convolution whose weight a kind of state changes before it is used."""

    change: Any

    def forward(self, x: Tensor) -> Tensor:
        self.change()
        return super().forward(x)


def imul(layer: Any) -> None:
    layer.weight.data *= layer.mask


def assigned(layer: Any) -> None:
    layer.weight.data = layer.weight.data * layer.mask


def renorm(layer: Any) -> None:
    layer.weight.data = torch.renorm(layer.weight.data, 2, 0, 0.3)


def no_grad(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(layer.mask)


def copied(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.copy_(layer.weight * layer.mask)


def replaced(layer: Any) -> None:
    if layer.weight.grad is None:
        layer.weight = nn.Parameter(layer.weight.data * layer.mask)


def replaced_by_result(layer: Any) -> None:
    if layer.calls == 1:
        layer.weight = nn.Parameter(layer.weight * layer.mask)


def by_dict(layer: Any) -> None:
    vars(layer)["_parameters"]["weight"].data.clamp_(-0.1, 0.1)
    layer._parameters["bias"].data.mul_(0.5)


def by_reference(layer: Any) -> None:
    layer.kept[0].data = layer.kept[0].data.clamp(-0.1, 0.1)
    assert torch.equal(layer.kept[0].data, layer.weight.data)


def detached(layer: Any) -> None:
    layer.weight.detach().mul_(layer.mask)


def other_memory(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.set_((layer.weight * layer.mask).detach())


def swapped(layer: Any) -> None:
    torch.utils.swap_tensors(layer.weight, nn.Parameter(layer.weight.detach() * layer.mask))
    torch.utils.swap_tensors(layer.mean, layer.weight.detach().mean((1, 2, 3)))


def exchanged(layer: Any) -> None:
    if layer.calls == 1:
        layer.other = nn.Parameter(layer.weight.detach() * layer.mask)
        torch.utils.swap_tensors(layer.weight, layer.other)


def by_itself(layer: Any) -> None:
    with torch.no_grad():
        layer.weight.mul_(layer.weight.abs()).copy_(layer.weight)
        torch.mul(layer.weight, 0.9, out=layer.weight)
    Tensor.data.__set__(layer.bias, layer.bias.data * 0.5)  # type: ignore[attr-defined]


def in_inference_mode(layer: Any) -> None:
    with torch.inference_mode():
        layer.weight.mul_(layer.mask)
    layer.float().double()


def items(layer: Any) -> None:
    with torch.no_grad():
        layer.weight[:, 0] = 0.05
        layer.weight.view(-1)[3:5] *= 0.5
    layer.weight.data[layer.weight.data.abs() < 0.05] = 0


def initialised(layer: Any) -> None:
    if layer.calls == 2:
        nn.init.constant_(layer.weight, 0.07)
        nn.init.zeros_(layer.bias)


def flattened(layer: Any) -> None:
    if layer.calls == 1:
        layer.flat = nn.utils.parameters_to_vector(layer.parameters()).detach().clone()
        nn.utils.vector_to_parameters(layer.flat, layer.parameters())
    layer.flat.mul_(0.9)


def frozen(layer: Any) -> None:
    layer.bias.requires_grad_(layer.calls % 2 == 0)
    layer.weight.data.mul_(layer.mask)


def hooked(layer: Any) -> None:
    if layer.calls == 1:
        layer.weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))


def parametrized(layer: Any) -> None:
    if layer.calls == 2:
        parametrize.register_parametrization(layer, "weight", _Halved())


def pruned(layer: Any) -> None:
    if layer.calls == 2:
        prune.l1_unstructured(layer, "weight", amount=0.4)


def penalized(layer: Any) -> None:
    layer.penalty = sum(parameter.square().sum() for parameter in layer.parameters())


def standardized(layer: Any) -> None:
    weight = layer.weight
    spread = weight.std((1, 2, 3), keepdim=True)
    layer.penalty = (weight - weight.mean((1, 2, 3), keepdim=True)).div(spread + 1e-5).abs().mean()


def statistic(layer: Any) -> None:
    layer.mean.data = 0.9 * layer.mean.data + 0.1 * layer.weight.data.mean((1, 2, 3))
    layer.mask.data = (layer.weight.data.abs() > 0.02).double()
    layer.weight.data.mul_(layer.mask)


class _Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x


class Binary(nn.Conv2d):
    """Computes with signs; the weights that are trained are kept on the parameter itself."""

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = vars(self)["_parameters"]["weight"], vars(self)["_parameters"]["bias"]
        x.data = x.data.sign()
        if not hasattr(weight, "org"):
            weight.org = self.weight.data.clone()
        weight.data = weight.org.sign() * 0.1
        y = F.conv2d(x, self.weight, None, self.stride, self.padding)
        bias.org = bias.data.clone()
        return y + bias.view(1, -1, 1, 1).expand_as(y)


class Twice(Layer):
    """Is used again once it has been changed."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        with torch.no_grad():
            self.bias.mul_(0.5)  # type: ignore[union-attr]
        return y + super().forward(x)


class TwiceAssigned(Layer):
    """As `Twice`, by ``data``."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.weight.data = self.weight.data * 0.5
        return y + super().forward(x)


class SpectralNorm(nn.Module):
    """As scripts had it before torch did."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        weight: Any = module.weight
        self.module = module
        del module._parameters["weight"]
        module.register_parameter("weight_bar", nn.Parameter(weight.data))
        module.register_parameter("weight_u", nn.Parameter(weight.data.new_ones(weight.shape[0]), requires_grad=False))
        module.register_buffer("weight_v", weight.data.new_ones(weight[0].numel()))

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self.module
        weight = module.weight_bar
        matrix = weight.view(weight.shape[0], -1)
        module.weight_v.data = F.normalize(torch.mv(torch.t(matrix.data), module.weight_u.data), dim=0)
        module.weight_u.data = F.normalize(torch.mv(matrix.data, module.weight_v.data), dim=0)
        sigma = module.weight_u.dot(matrix.mv(module.weight_v))
        module.weight = weight / sigma.expand_as(weight)
        result: Tensor = module.forward(x)
        return result


KINDS = {
    each.__name__: each
    for each in (
        *(imul, assigned, renorm, no_grad, copied, replaced, replaced_by_result, by_dict),
        *(
            by_reference,
            detached,
            other_memory,
            swapped,
            exchanged,
            by_itself,
            in_inference_mode,
            items,
            initialised,
            flattened,
            frozen,
            hooked,
            parametrized,
            pruned,
            penalized,
        ),
        *(standardized, statistic),
    )
}
LAYERS: dict[str, Any] = {"binary": Binary, "twice": Twice, "twice assigned": TwiceAssigned}


def layer_of(kind: str) -> Any:
    layer = LAYERS.get(kind, Layer)(4, 4, 3, padding=1)
    layer.calls, layer.kept = 0, [layer.weight]
    change = KINDS.get(kind, lambda layer: None)

    def changed(layer: Any) -> None:
        layer.calls += 1
        change(layer)

    layer.change = changed.__get__(layer)
    layer.register_buffer("mask", (torch.arange(36).view(1, 4, 3, 3) % 3 > 0).double().expand(4, -1, -1, -1).clone())
    layer.register_buffer("mean", torch.zeros(4))
    if kind == "pre-hook":
        layer.register_forward_pre_hook(lambda layer, _: imul(layer))
    if kind == "hook":
        layer.register_forward_hook(lambda layer, *_: assigned(layer))
    if kind == "spectral":
        layer = SpectralNorm(layer)
    return layer


outputs = 2
"""Of the last layer of `network`."""


def network(kind: str) -> nn.Sequential:
    torch.manual_seed(3)
    layer = layer_of(kind)
    net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), layer, nn.Tanh(), nn.Conv2d(4, outputs, 1))
    if kind == "submodule twice":
        layer.change = lambda: imul(layer)
        net.insert(3, layer)
    if kind == "tied":
        layer.change = lambda: imul(layer)
        other: Any = nn.Conv2d(4, 4, 3, padding=1)
        other.weight = layer.weight
        net.insert(3, other)
    if kind in SHARED:
        other = SHARED[kind](4, 4, 3, padding=1)
        other.weight.data, other.bias.data = layer.weight.data, net[0].bias.data
        net.insert(3, other)
    return net


SHARED = {"shared": nn.Conv2d, "shared and transposed": nn.ConvTranspose2d}
"""Layers that have another layer's memory."""

OTHERS = (*SHARED, "submodule twice", "tied", "pre-hook", "hook", "spectral", "stepped in backward", *LAYERS)


def trained(kind: str) -> dict[str, Any]:
    """What three steps of training find."""
    net = network(kind)
    optimizer = torch.optim.SGD(net.parameters(), 0.3, momentum=0.5)
    if kind == "stepped in backward":
        single = {p: torch.optim.SGD([p], 0.3) for p in net.parameters()}
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p: (single[p].step(), single[p].zero_grad())[0])
    found: dict[str, Any] = {}
    x = torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(2))
    for step in range(3):
        optimizer.zero_grad()
        loss = net(x).square().mean() + sum(getattr(each, "penalty", 0.0) for each in net)
        loss.backward()
        found[f"loss {step}"] = loss.detach()
        found |= {f"grad {step} of {name}": p.grad for name, p in net.named_parameters()}
        for parameter in net.parameters():
            if hasattr(parameter, "org"):
                parameter.data.copy_(parameter.org)
        optimizer.step()
        for parameter in net.parameters():
            if hasattr(parameter, "org"):
                parameter.org.copy_(parameter.data.clamp_(-1, 1))
    found |= {f"state {name}": value for name, value in net.state_dict().items()}
    held = {id(each) for each in optimizer.param_groups[0]["params"]}
    found |= {f"trained {name}": id(p) in held for name, p in net.named_parameters()}
    found |= {f"org of {name}": getattr(p, "org", None) for name, p in net.named_parameters()}
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in found.items()}


def _same(a: Any, b: Any) -> bool:
    tensors = isinstance(a, Tensor) and isinstance(b, Tensor)
    return torch.allclose(a, b, 1e-9, 1e-11) if tensors else a == b


def unlike(kinds: list[str], partitions: list[str]) -> dict[str, str]:
    """What is not what one process finds."""
    torch.set_default_dtype(torch.float64)
    found: dict[str, str] = {}
    for kind in kinds:
        expected = trained(kind)
        for partition in partitions:
            try:
                with distconv.distributed_script(distconv.init(partition, device_type="cpu")):
                    here = {k: distconv.gather(x) if isinstance(x, Tensor) else x for k, x in trained(kind).items()}
            except Exception as error:
                found[f"{kind}, {partition}"] = repr(error)
                continue
            wrong = [name for name, value in expected.items() if not _same(value, here.get(name))]
            if wrong or list(here) != list(expected):
                found[f"{kind}, {partition}"] = f"{wrong[:9]}"
    return found


PARTITIONS = ["height=2", "sample=2", "channel=2"]


@pytest.mark.parametrize("partition", PARTITIONS)
def test_what_models_do_to_their_parameters(ranks: Callable[[int], Ranks], partition: str) -> None:
    # With sharded channels what is flattened is refused.
    kinds = [each for each in (*KINDS, *OTHERS) if (each, partition) != ("flattened", "channel=2")]
    assert ranks(2).run(unlike, kinds, [partition]) == [{}] * 2


def beside_full_shards() -> dict[str, str]:
    """The same where a large parameter is sharded along all axes, and these small ones are not."""
    fully_sharded._division.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DISTCONV_SHARD_PARAMETERS", "1")
        patch.setattr(fully_sharded, "LEAST_BYTES", 1 << 13)
        patch.setitem(globals(), "outputs", 512)
        found = unlike(["hook", "twice assigned"], PARTITIONS)
    assert fully_sharded._division.cache_info().currsize, "no parameter was sharded along all axes"
    return found


def test_what_models_do_to_parameters_beside_full_shards(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(beside_full_shards) == [{}] * 2
