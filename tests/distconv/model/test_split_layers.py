"""Layers whose channels are sharded: parameters as their layouts describe them, what a step moves, what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from collectives import refusals
from ranks import Ranks
from small_tensors import gathered_up_to
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

import distconv
from distconv.model.parameters import parameter_placements
from distconv.settings.channels import ChannelMap, weight_dims
from distconv.settings.partition import Partition
from distconv.tensors.dtensors import wrap
from distconv.transfer import group_calls
from distconv.transfer.local_part import local_as


class Modulated(nn.Module):
    """A convolution with a kernel for each sample, made of the sample."""

    def forward(self, x: Tensor) -> Tensor:
        kernels = torch.stack([x[:, :, :3, :3], x[:, :, 1:4, 1:4].sin()], 1).flatten(0, 1)
        y = F.conv2d(x.reshape(1, -1, *x.shape[2:]), kernels, padding=1, groups=x.shape[0])
        return y.view(x.shape[0], 2, *y.shape[2:])


LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(6, 4, 3, padding=1), (2, 6, 5, 4)),
    "uneven": (lambda: nn.Conv2d(5, 7, 3, stride=2), (2, 5, 7, 6)),
    "groups": (lambda: nn.Conv2d(6, 9, 3, groups=3), (2, 6, 5, 4)),
    "transposed": (lambda: nn.ConvTranspose2d(6, 5, 3, 2), (2, 6, 3, 4)),
    "linear": (lambda: nn.Linear(6, 5), (3, 6)),
    "linear of positions": (lambda: nn.Linear(6, 5), (2, 3, 6)),
    "batch norm": (lambda: nn.BatchNorm2d(6), (2, 6, 3, 4)),
    "group norm": (lambda: nn.GroupNorm(2, 6), (2, 6, 3, 4)),
    "kernels of samples": (Modulated, (3, 6, 5, 4)),
    "PReLU": (lambda: nn.PReLU(6), (2, 6, 3, 4)),
}


def with_sharded_parameters(partition: str, algorithm: str) -> dict[str, float]:
    """{layer: error} with parameters held as DTensors in the layout that ``parameter_placements`` gives them."""
    mesh, found = distconv.init(partition, device_type="cpu", channel_algorithm=algorithm), {}
    for name, (build, shape) in LAYERS.items():
        torch.manual_seed(3)
        plain = build().double()
        for parameter in plain.parameters():
            nn.init.normal_(parameter)
        layouts = parameter_placements(plain, algorithm, Partition.parse(partition))
        held = copy.deepcopy(plain)
        for key, parameter in plain.named_parameters():
            local = local_as(parameter.detach(), mesh, layouts[key]).clone()
            held._parameters[key] = nn.Parameter(wrap(local, mesh, layouts[key], parameter.shape))
        x = torch.randn(shape, dtype=torch.float64)
        alone, here = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected = plain(alone)
        y = held.forward(distconv.shard(here, mesh))
        weight = torch.randn_like(expected)
        (expected * weight).sum().backward()
        (distconv.gather(y) * weight).sum().backward()
        worst = float((distconv.gather(y) - expected).abs().max())
        worst = max(worst, float((here.grad - alone.grad).abs().max()))
        for key, parameter in held.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            whole = parameter.grad.redistribute(mesh, [Replicate()] * mesh.ndim).to_local()
            worst = max(worst, float((whole - plain.get_parameter(key).grad).abs().max()))
        found[name] = worst
    return found


@pytest.mark.parametrize(
    "size, partition, algorithm",
    [
        (2, "channel=2", "x"),
        (2, "channel=2", "y"),
        (4, "channel=4", "auto"),
        (4, "channel=2,filter=2", "w"),
        (4, "sample=2,channel=2", "y"),
    ],
)
def test_layers_work_on_the_parameters_that_the_layouts_describe(
    ranks: Callable[[int], Ranks], size: int, partition: str, algorithm: str
) -> None:
    for found in ranks(size).run(with_sharded_parameters, partition, algorithm):
        assert not {name: worst for name, worst in found.items() if not worst < 1e-9}


def best(equal: bool) -> list[bool]:
    """Whether the best k along dims that are sharded, unevenly, or not are those of one process; many are ``equal``."""
    mesh = distconv.init(f"channel={dist.get_world_size()}", device_type="cpu")
    x = torch.randn(4, 7, 5, dtype=torch.float64)
    x = x.relu().round() if equal else x
    result = []
    for dim, k, largest in ((1, 3, True), (1, 7, False), (-2, 1, True), (2, 2, True), (0, 0, True)):
        alone, here = (x.clone().requires_grad_() for _ in range(2))
        values, places = distconv.shard(here, mesh).topk(k, dim, largest)
        expected = alone.topk(k, dim, largest)
        result += [torch.equal(distconv.gather(values), expected[0]), torch.equal(distconv.gather(places), expected[1])]
        expected[0].square().sum().backward()
        values.square().sum().backward()
        result.append(torch.equal(here.grad, alone.grad))
    for most in (1 << 20,) if equal else (0, 1 << 20):
        flat = distconv.shard(x[:1, :, :1], mesh).flatten()
        with gathered_up_to(most):
            places = flat.topk(3)[1]
        result.append(torch.equal(distconv.gather(places), x[0, :, 0].topk(3)[1]))
    return result


@pytest.mark.parametrize("equal", [False, True])
def test_the_best_of_split_channels(ranks: Callable[[int], Ranks], equal: bool) -> None:
    assert all(all(found) for found in ranks(3).run(best, equal))


def bytes_of_a_step(partition: str, algorithm: str, channels: int, filters: int) -> list[int]:
    """Bytes that this rank hands to the transport in forward, and in backward, of a 3x3 convolution of (2, C, 6, 5)."""
    mesh = distconv.init(partition, device_type="cpu", channel_algorithm=algorithm)
    conv = nn.Conv2d(channels, filters, 3, padding=1, bias=False)
    weight = wrap(conv.weight.detach(), mesh, [Replicate()] * mesh.ndim, conv.weight.shape).requires_grad_()
    x = distconv.shard(torch.randn(2, channels, 6, 5), mesh).detach().requires_grad_()
    moved: list[int] = []
    transport = group_calls.all_to_all_single

    def counting(output: Tensor, input: Tensor, received: list[int], sent: list[int], **options: Any) -> Any:
        moved.append(sum(sent) * input.element_size())
        return transport(output, input, received, sent, **options)

    group_calls.all_to_all_single = counting
    try:
        y = F.conv2d(x, weight, padding=1)
        forward = sum(moved)
        moved.clear()
        torch.autograd.grad(y, (x, weight), y.detach())
    finally:
        group_calls.all_to_all_single = transport
    return [forward, sum(moved)]


@pytest.mark.parametrize("size", [2, 4])
def test_what_moves_equals_the_formulas(ranks: Callable[[int], Ranks], size: int) -> None:
    c, f, unit = 8, 16, 2 * 6 * 5 * 4
    partition, share = f"channel={size}", (size - 1) / size
    for sent in ranks(size).run(bytes_of_a_step, partition, "x", c, f):
        assert sent == [share * f * unit, share * f * unit]
    for sent in ranks(size).run(bytes_of_a_step, partition, "y", c, f):
        assert sent == [share * c * unit, 2 * share * c * unit]
    assert weight_dims(ChannelMap(c, f), "auto", {"channel": size}) == (0,)
    assert ranks(size).run(bytes_of_a_step, partition, "auto", c, f) == ranks(size).run(
        bytes_of_a_step, partition, "y", c, f
    )


def test_the_algorithm_w_moves_channels_over_one_axis_and_filters_over_the_other(ranks: Callable[[int], Ranks]) -> None:
    c, f, unit = 8, 16, 2 * 6 * 5 * 4
    for rank, sent in enumerate(ranks(4).run(bytes_of_a_step, "channel=2,filter=2", "w", c, f)):
        # Of its F/2 filters a rank keeps those that it owns: F/4 on the diagonal of the grid, none elsewhere.
        partial, own = f / 2 - (f / 4 if rank in (0, 3) else 0), f / 4
        fetched = own * (1 if rank in (0, 3) else 2)
        assert sent == [(c / 4 + partial) * unit, (2 * c / 4 + fetched) * unit], rank


def refused() -> list[str]:
    mesh = distconv.init("channel=2", device_type="cpu")
    x = distconv.shard(torch.randn(2, 4, 8, 8), mesh)
    return refusals(
        (
            lambda: F.linear(x[:, :, 0, 0], torch.randn(3, 5)),
            lambda: distconv.init("channel=2", channel_algorithm="w"),
        )
    )


def test_refusals_are_one_line_on_all_ranks_and_before_communication(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(refused)
    assert first == second
    for message, words in zip(
        first,
        [
            "linear layer of an input (2, 4) with a weight (3, 5)",
            "channel algorithm 'w' on partition 'channel=2': accepted with axes channel and filter",
        ],
        strict=True,
    ):
        assert words in message and "\n" not in message, first
