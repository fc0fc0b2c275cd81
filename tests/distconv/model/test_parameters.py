"""Sharded parameters: one process's numbers, 1/p of its bytes, allreduces among those who hold the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import distconv
from distconv.model.strategy import Strategy
from distconv.transfer import group_calls

pytestmark = pytest.mark.gloo


class Net(nn.Module):
    """A residual block between convolutions; a scale and a convolution that two layers share."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=bias), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.block = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=bias), nn.ReLU(inplace=True))
        self.shortcut = nn.Conv2d(8, 8, 1, bias=bias)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.head = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 12, 3, stride=2, padding=1, groups=2, bias=bias))
        self.twice = nn.Conv2d(12, 12, 3, padding=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = (self.block(x) + self.shortcut(x)) * self.scale
        return self.twice(self.twice(self.head(y))).mean((2, 3))


MIXED = {"stem": "height=4", "block": "channel=4", "head.*": "channel=2,filter=2", "*": "sample=2,channel=2"}
CASES = [
    (2, "channel=2", None),
    (3, "channel=3", None),
    (4, "sample=2,channel=2", None),
    (4, "channel=2,filter=2", None),
    (4, "sample=4", {"block": "channel=4", "shortcut": "height=2,width=2"}),
    (4, "sample=4", MIXED),
    (4, "channel=4", {"*": "sample=4"}),
    (4, "height=2,width=2", {"b*": "sample=4", "head.*": "height=4", "*": "sample=2,width=2"}),
]


def steps(net: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> list[float]:
    """Losses and gradient norms of three steps of two micro-batches. The optimizer comes before the first call."""
    generator = torch.Generator().manual_seed(5)
    optimizer = make(net.parameters())
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(5, 3, 8, 6, dtype=torch.float64, generator=generator)
            loss = net(x).square().mean()
            loss.backward()
        losses += [loss.item(), float(nn.utils.clip_grad_norm_(net.parameters(), 0.5, 2.0 if step else float("inf")))]
        optimizer.step()
    return losses


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=1e-2)


def adam(parameters: Any) -> torch.optim.Optimizer:
    # Of gradients near rounding Adam makes steps near lr.
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-3, foreach=False)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3, foreach=True)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-3, eps=1e-3, fused=True)


def train(partition: str, strategy: dict[str, str] | None, make: Any, script: bool) -> tuple[float, float, bool]:
    """Largest differences of losses and of parameters; whether keys and shapes are those of the plain model."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(1)
    plain = Net().double()
    model = copy.deepcopy(plain)
    expected = steps(plain, make)
    if script:
        parsed = None if strategy is None else Strategy.parse(strategy)
        with distconv.distributed_script(mesh, parsed):
            found = steps(model, make)
    else:
        found = steps(distconv.parallelize(model, mesh, strategy), make)
    whole = distconv.whole_state(model.state_dict())
    state = plain.state_dict()
    same = list(whole) == list(state) and all(type(t) is Tensor and t.shape == state[k].shape for k, t in whole.items())
    losses = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    return losses, max(float((whole[key] - state[key]).abs().max()) for key in state), same


@pytest.mark.parametrize("size, partition, strategy", CASES)
def test_training_equals_one_process(ranks: Callable[[int], Ranks], size: int, partition: str, strategy: Any) -> None:
    for make, script in ((sgd, False), (adamw, True)):
        for losses, gap, same in ranks(size).run(train, partition, strategy, make, script):
            assert losses < 1e-11 and gap < 1e-11 and same


@pytest.mark.parametrize("make", [adam, fused])
def test_any_optimizer(ranks: Callable[[int], Ranks], make: Any) -> None:
    for losses, gap, _ in ranks(4).run(train, "sample=4", MIXED, make, True):
        assert losses < 1e-11 and gap < 1e-11


def bytes_held(partition: str) -> tuple[list[int], list[int], bool]:
    """Bytes of weights, gradients and Adam's state on this rank and in one process; whether initial values are the
    same, and copies have gradients and attributes as little as those of plain parameters."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(1)
    plain = nn.Sequential(nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ConvTranspose2d(16, 8, 3, bias=False))
    model = distconv.parallelize(copy.deepcopy(plain), mesh)
    whole, state = distconv.whole_state(model.state_dict()), plain.state_dict()
    same = all(torch.equal(whole[key], value) for key, value in state.items())
    found = []
    for net in (model, plain):
        optimizer = torch.optim.Adam(net.parameters())
        net(torch.randn(4, 8, 9, 9)).square().mean().backward()
        optimizer.step()
        moments = [value for state in optimizer.state.values() for key, value in state.items() if key != "step"]
        kinds: list[list[Any]] = [list(net.parameters()), [p.grad for p in net.parameters()], moments]
        local = [[t._local_tensor if isinstance(t, DTensor) else t for t in kind] for kind in kinds]
        next(net.parameters()).latent = moments[0]
        copies = copy.deepcopy(net).parameters()
        same &= all(copied.grad is None and not hasattr(copied, "latent") for copied in copies)
        found.append(
            [sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in k}.values()) for k in local]
        )
    return found[0], found[1], same


@pytest.mark.parametrize("size, partition", [(2, "channel=2"), (4, "channel=4"), (4, "channel=2,filter=2")])
def test_a_rank_holds_its_part(ranks: Callable[[int], Ranks], size: int, partition: str) -> None:
    for here, alone, same in ranks(size).run(bytes_held, partition):
        assert [share * size for share in here] == alone and same


@contextmanager
def counted() -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """(elements, ranks) of every allreduce within."""
    found: list[tuple[int, tuple[int, ...]]] = []
    transport = group_calls.all_reduce

    def counting(tensor: Tensor, *rest: Any, group: Any = None, **options: Any) -> Any:
        found.append((tensor.numel(), tuple(dist.get_process_group_ranks(group or dist.group.WORLD))))
        return transport(tensor, *rest, group=group, **options)

    group_calls.all_reduce = counting
    try:
        yield found
    finally:
        group_calls.all_reduce = transport


def allreduces(partition: str, strategy: dict[str, str] | None) -> list[tuple[int, tuple[int, ...]]]:
    mesh = distconv.init(partition, device_type="cpu")
    layers = [nn.Conv2d(4, 4, 3, padding=1) for _ in range(4)]
    model = distconv.parallelize(nn.Sequential(*layers), mesh, strategy)
    y = model(torch.randn(4, 4, 8, 8))
    with counted() as found:
        (y * y).backward(torch.ones_like(y))
    return found


LAYER = 4 * 4 * 9 + 4


@pytest.mark.parametrize(
    "partition, strategy, expected",
    [
        ("sample=4", None, [[(4 * LAYER, (0, 1, 2, 3))]] * 4),
        ("channel=4", None, [[]] * 4),
        ("sample=2,channel=2", None, [[(4 * LAYER // 2, (r % 2, r % 2 + 2))] for r in range(4)]),
        ("channel=2,height=2", None, [[(4 * LAYER // 2, (r // 2 * 2, r // 2 * 2 + 1))] for r in range(4)]),
        (
            "sample=4",
            {"0": "channel=4", "1": "sample=2,channel=2"},
            [[(2 * LAYER, (0, 1, 2, 3)), (LAYER // 2, (r % 2, r % 2 + 2))] for r in range(4)],
        ),
    ],
)
def test_gradients_are_reduced_among_those_who_hold_the_same(
    ranks: Callable[[int], Ranks], partition: str, strategy: Any, expected: list[Any]
) -> None:
    assert ranks(4).run(allreduces, partition, strategy) == expected


def around() -> list[Any]:
    """What a script holds from before its model's first call, and what is loaded afterwards."""
    mesh = distconv.init("sample=2,channel=2", device_type="cpu")
    torch.manual_seed(1)
    plain = Net().double()
    model = copy.deepcopy(plain)
    for net in (plain, model):
        net.stem[0].weight.register_hook(lambda grad: grad.clamp(-1e-5, 1e-5))
        net.stem[0].weight.decay = False  # type: ignore[union-attr]
    alone = sgd(plain.parameters())
    first = steps_with(plain, alone)
    weights, momentum = copy.deepcopy(plain.state_dict()), copy.deepcopy(alone.state_dict())
    second = steps_with(plain, alone)
    found: list[Any] = []
    with distconv.distributed_script(mesh):
        held, optimizer = model.stem[0].weight, sgd(model.parameters())
        found.append(max(abs(a - b) for a, b in zip(first, steps_with(model, optimizer), strict=True)) < 1e-11)
        found.append(set(optimizer.param_groups[0]["params"]) == set(model.parameters()))
        found.append(model.stem[0].weight is not held and model.stem[0].weight.decay is False)
        held.later = held.grad.norm()
        found.append(model.stem[0].weight.later == model.stem[0].weight.grad.norm())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        optimizer = sgd(model.parameters())
        model.load_state_dict(weights)
        optimizer.load_state_dict(momentum)
        found.append(max(abs(a - b) for a, b in zip(second, steps_with(model, optimizer), strict=True)) < 1e-11)
        kept = optimizer.state[model.stem[0].weight]["momentum_buffer"]
        found.append(isinstance(kept, DTensor) and kept._local_tensor.numel() * 2 == kept.numel())
    return found


def steps_with(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    return steps(net, lambda _: optimizer)


def test_what_a_script_holds_follows(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(around):
        assert found == [True] * 6


def again() -> list[float]:
    """One model under one partition after another, with one optimizer."""
    torch.manual_seed(1)
    plain = Net().double()
    model = copy.deepcopy(plain)
    mesh = distconv.init("sample=2,channel=2", device_type="cpu")
    here, alone = sgd(distconv.parallelize(model, mesh).parameters()), sgd(plain.parameters())
    gaps = []
    for partition in ("sample=2,channel=2", "channel=4", "sample=4", "channel=2,filter=2"):
        distconv.parallelize(model, distconv.init(partition, device_type="cpu"))
        expected, found = steps_with(plain, alone), steps_with(model, here)
        gaps.append(max(abs(a - b) for a, b in zip(expected, found, strict=True)))
    return gaps


def test_another_partition_while_training(ranks: Callable[[int], Ranks]) -> None:
    for gaps in ranks(4).run(again):
        assert max(gaps) < 1e-11


def by_hand() -> list[tuple[float, float]]:
    """Sums over all gradients as a script adds them up, and over those of layers on two meshes together."""
    mesh = distconv.init("sample=4", device_type="cpu")
    torch.manual_seed(1)
    plain = Net().double()
    model = distconv.parallelize(copy.deepcopy(plain), mesh, MIXED)
    x = torch.randn(4, 3, 8, 6, dtype=torch.float64)
    totals = []
    for net in (model, plain):
        net(x).square().mean().backward()
        total = 0
        for parameter in net.parameters():
            total = total + parameter.grad.norm() ** 2  # type: ignore[union-attr, assignment]
        for parameter in net.parameters():
            parameter.grad.mul_(1 / (total + 1))  # type: ignore[union-attr]
        both = net.block[0].weight.grad[..., :1, :1] + net.shortcut.weight.grad
        totals.append(
            (
                float(sum(parameter.grad.abs().sum() for parameter in net.parameters())),  # type: ignore[union-attr]
                float(both.square().sum()),
            )
        )
    return list(zip(*totals, strict=True))


def test_gradients_of_several_partitions_by_hand(ranks: Callable[[int], Ranks]) -> None:
    for sums in ranks(4).run(by_hand):
        for found, expected in sums:
            assert found == pytest.approx(expected, rel=1e-11)
