"""What a script does with parameters whose channels are split, also with those it holds from before the first call."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as pruning
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils import fusion, parametrizations, parametrize

import distconv
from distconv.agreement.ledger import Turns

pytestmark = pytest.mark.gloo


def network() -> nn.Sequential:
    torch.manual_seed(1)
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2))
    return nn.Sequential(*first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).double()


def images() -> Tensor:
    return torch.randn(4, 3, 8, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def loss(net: nn.Module) -> Tensor:
    return net(images().to(next(net.parameters()).dtype)).square().mean()


def step(net: nn.Module, optimizer: Any = None) -> nn.Module:
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.zero_grad()
    loss(net).backward()
    optimizer.step()
    return net


def lists(net: nn.Sequential) -> list[Any]:
    held = list(net.parameters())
    by_parameter = {parameter: index for index, parameter in enumerate(held)}
    grads = torch.autograd.grad(loss(net), held)
    with torch.no_grad():
        for parameter, grad in zip(held, grads, strict=True):
            parameter.sub_(0.1 * grad)
    loss(net).backward()
    norm = nn.utils.clip_grad_norm_(held, 0.1)
    step(net, torch.optim.SGD(held, lr=0.1, momentum=0.9))
    held[0].requires_grad_(False)
    return [norm, loss(net), net[0].weight.requires_grad, [by_parameter[parameter] for parameter in held]]


def own_optimizer(net: nn.Sequential) -> list[Any]:
    held, state = list(net.parameters()), {}
    for _ in range(2):
        loss(net).backward()
        for parameter in held:
            kept = state.setdefault(parameter, torch.zeros_like(parameter))
            kept.mul_(0.9).add_(parameter.grad.data)  # type: ignore[union-attr]
            parameter.data.add_(kept, alpha=-0.1)
            parameter.grad.zero_()  # type: ignore[union-attr]
    return [loss(net), copy.deepcopy(held)[0].sum()]


class Sharpened(torch.optim.Optimizer):
    """Has another optimizer, whose parameters it shares, and state of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["before"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05)

    @torch.no_grad()
    def second_step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["before"]
        self.base.step()


def wrapping_optimizer(net: nn.Sequential) -> list[Any]:
    optimizer, early = Sharpened(net.parameters()), torch.optim.SGD(net.parameters(), lr=0.1)
    for parameter in net.parameters():
        early.state[parameter]["momentum_buffer"] = torch.ones_like(parameter)
    for _ in range(2):
        loss(net).backward()
        found = [early.state[parameter]["momentum_buffer"].sum() for parameter in net.parameters()]
        optimizer.first_step()
        loss(net).backward()
        optimizer.second_step()
    state = optimizer.state_dict()["state"]
    return [*found, list(state), *(each["before"].sum() for each in state.values()), loss(net)]


def penalty_before(net: nn.Sequential) -> list[Any]:
    penalty = sum(parameter.pow(2).sum() for parameter in net.parameters())
    (loss(net) + penalty).backward()
    return [parameter.grad for parameter in net.parameters()]


def average(net: nn.Sequential) -> list[Any]:
    mean = copy.deepcopy(net)
    held = list(mean.parameters())
    for _ in range(2):
        step(net)
        with torch.no_grad():
            for kept, parameter in zip(held, net.parameters(), strict=True):
                kept.mul_(0.9).add_(parameter, alpha=0.1)
        loss(mean)
    return [loss(mean)]


def other_dtypes(net: nn.Sequential) -> list[Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net[0].weight.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    graph = loss(step(net, optimizer))  # alive
    net.half()
    dtypes = [net[0].weight.dtype, net[0].weight.grad.dtype]
    del graph
    return [*dtypes, loss(step(net.double(), optimizer))]


def other_values(net: nn.Sequential) -> list[Any]:
    held = list(net.parameters())
    vector = nn.utils.parameters_to_vector(step(net).parameters())
    nn.utils.vector_to_parameters(vector * 0.5, net.parameters())
    halves = loss(net)
    held[0].data = net[0].weight.data.clamp(-0.1, 0.1)
    twin = nn.Conv2d(3, 8, 3).double()
    twin.weight.data = net[0].weight.data.clone()
    net[0].weight.data.mul_(2)
    net[7].weight, net[7].bias = (nn.Parameter(each.detach()[:3]) for each in net[7].parameters())
    return [vector.sum(), halves, twin.weight.sum(), loss(step(net)), *net[7].weight.shape]


def initialised(net: nn.Sequential) -> list[Any]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    step(net, optimizer)
    nn.init.eye_(net[7].weight)
    nn.init.dirac_(net[3].weight)
    nn.init.constant_(net[0].weight, 0.1)
    identity = nn.init.orthogonal_(net[7].weight.detach().clone()) @ nn.init.orthogonal_(net[7].weight.clone()).T
    bounded = nn.init.trunc_normal_(net[3].weight.detach().clone(), a=-0.5, b=0.5).abs().amax() <= 0.5
    return [loss(step(net, optimizer)), bounded, identity.shape]


def fused(net: nn.Sequential) -> list[Any]:
    step(net).eval()
    together = fusion.fuse_conv_bn_eval(net[0], net[1])  # type: ignore[type-var]
    by_hand = nn.Conv2d(3, 8, 3, padding=1).double().requires_grad_(False)
    scale = torch.diag(net[1].weight.div(torch.sqrt(net[1].eps + net[1].running_var)))
    with torch.no_grad():
        by_hand.weight.copy_(torch.mm(scale, net[0].weight.view(8, -1)).view(by_hand.weight.shape))
    return [loss(net), together(images()).sum(), by_hand(images()).sum()]


def parametrized(net: nn.Sequential) -> list[Any]:
    parametrizations.weight_norm(step(net)[7])
    parametrizations.spectral_norm(net[0])
    first = loss(step(net))
    parametrize.remove_parametrizations(net[7], "weight")
    return [first, loss(step(net)), isinstance(net[7].weight, nn.Parameter), len(list(net[7].parameters()))]


def pruned(net: nn.Sequential) -> list[Any]:
    pruning.l1_unstructured(step(net)[0], "weight", amount=0.3)
    pruning.ln_structured(net[7], "weight", amount=0.5, n=2, dim=0)
    first = loss(step(net))
    pruning.remove(net[0], "weight")
    return [first, loss(step(net)), (net[0].weight == 0).sum()]


def files(net: nn.Sequential) -> list[Any]:
    held = list(net.parameters())
    written = io.BytesIO()
    torch.save((step(net), held), written)
    written.seek(0)
    read, kept = torch.load(written, weights_only=False)
    return [type(read[0].weight), type(kept[0]), read[0].weight, kept[0], torch.histc(held[0].detach(), 5)]


USES = (
    *(lists, own_optimizer, wrapping_optimizer, penalty_before, average, other_dtypes, other_values, initialised),
    *(fused, parametrized, pruned, files),
)


def plain(values: list[Any]) -> list[Any]:
    return [distconv.gather(value.detach()) if isinstance(value, Tensor) else value for value in values]


def unlike(partition: str) -> dict[str, str]:
    """What of a script's numbers is not what one process has."""
    mesh, found = distconv.init(partition, device_type="cpu"), {}
    for use in USES:
        expected = plain(use(network()))
        with distconv.distributed_script(mesh):
            here = plain(use(network()))
        for a, b in zip(expected, here, strict=True):
            if a.dtype != b.dtype or not torch.allclose(a, b, 1e-9, 1e-11) if isinstance(a, Tensor) else a != b:
                found[use.__name__] = f"{b}, not {a}"
    return found


@pytest.mark.parametrize("partition", ["sample=2,channel=2", "channel=2,filter=2"])
def test_scripts_hold_and_change_parameters(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert ranks(4).run(unlike, partition) == [{}] * 4


def refused_and_compared() -> tuple[str, int]:
    """What reading a parameter says whose memory has changed, and how many tensors ranks still compare."""
    with distconv.distributed_script(distconv.init("channel=2", device_type="cpu")):
        net = step(network())
        vector = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
        nn.utils.vector_to_parameters(vector, net.parameters())
        vector.mul_(0.5)
        with pytest.raises(distconv.UnsupportedOperation) as raised:
            net[0].weight.detach()
        return str(raised.value).partition(";")[0], len(Turns().take(net, buffers=False))


def test_parameters_that_a_script_may_not_read_are_compared_among_ranks(ranks: Callable[[int], Ranks]) -> None:
    ((said, compared), _) = ranks(2).run(refused_and_compared)
    assert "its tensor was changed after the copy was made" in said and compared > 0
