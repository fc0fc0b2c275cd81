"""Functions save tensors for backward on ranks where torch does: what a checkpoint computes again depends on that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import distconv

pytestmark = pytest.mark.gloo


class Function(nn.Module):
    """A convolution and a function of its result, which counts the tensors that the function saves."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.again, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)
        self.up, self.slope, self.weight = nn.ConvTranspose2d(4, 4, 2, 2), nn.Parameter(torch.ones(4)), nn.Linear(4, 4)
        self.function, self.saved = function, 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)

        def note(saved: Tensor) -> Tensor:
            self.saved += 1
            return saved

        with torch.autograd.graph.saved_tensors_hooks(note, lambda saved: saved):
            return self.function(self, x)


FUNCTIONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    **{
        f"{mode} {by}": lambda _, x, mode=mode, by=by: F.pad(x, by, mode)
        for mode in ("constant", "reflect", "replicate", "circular")
        for by in ((0, 0, 0, 0), (1, 1, 0, 0), (0, 0, 1, 1), (1, 1, 1, 1))
    },
    **{
        name: lambda _, x, name=name: getattr(F, name)(x)
        for name in [
            "relu",
            "silu",
            "gelu",
            "hardtanh",
            "relu6",
            "leaky_relu",
            "elu",
            "softplus",
            "dropout",
            "instance_norm",
        ]
    },
    **{
        name: lambda _, x, name=name: getattr(x, name)()
        for name in [
            "sigmoid",
            "tanh",
            "exp",
            "abs",
            "neg",
            "sqrt",
            "square",
            "clone",
            "contiguous",
            "double",
            "sum",
            "mean",
        ]
    },
    "convolution": lambda self, x: self.again(x),
    "transposed convolution": lambda self, x: self.up(x),
    "batch norm": lambda self, x: self.norm(x),
    "group norm": lambda _, x: F.group_norm(x, 2),
    "layer norm": lambda _, x: F.layer_norm(x, x.shape[1:]),
    "prelu": lambda self, x: F.prelu(x, self.slope),
    "linear": lambda self, x: self.weight(x.permute(0, 2, 3, 1)),
    "maximum pool": lambda _, x: F.max_pool2d(x, 2),
    "average pool": lambda _, x: F.avg_pool2d(x, 2),
    "adaptive pool": lambda _, x: F.adaptive_avg_pool2d(x, 4),
    "nearest": lambda _, x: F.interpolate(x, scale_factor=2),
    "bilinear": lambda _, x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "shuffle": lambda _, x: F.pixel_shuffle(x, 2),
    "softmax": lambda _, x: x.softmax(1),
    "clamp": lambda _, x: x.clamp(-1, 1),
    "sum": lambda _, x: x + 1,
    "product": lambda _, x: x * x,
    "quotient": lambda _, x: x / 2,
    "mean of rows": lambda _, x: x.mean(3),
    "maximum of rows": lambda _, x: x.amax(3),
    "deviation": lambda _, x: x.std(3),
    "normalize": lambda _, x: F.normalize(x, dim=1),
    "flatten": lambda _, x: x.flatten(2),
    "concatenation": lambda _, x: torch.cat([x, x], 1),
    "slice": lambda _, x: x[:, :, 1:3],
    "flip": lambda _, x: x.flip(2),
    "roll": lambda _, x: x.roll(1, 2),
    "index": lambda _, x: x[:, [0, 2]],
    "mask": lambda _, x: x.masked_fill(x > 0, 0.0),
    "where": lambda _, x: torch.where(x > 0, x, 0.0),
    "unfold": lambda _, x: F.unfold(x, 3, padding=1),
    "attention": lambda _, x: F.scaled_dot_product_attention(*(x.flatten(2).transpose(1, 2),) * 3),
}


def saving(partition: str | None) -> dict[str, bool]:
    """By function, whether it saves a tensor."""
    mesh = None if partition is None else distconv.init(partition, device_type="cpu")
    found = {}
    for name, function in FUNCTIONS.items():
        torch.manual_seed(0)
        net = Function(function)
        if mesh is not None:
            distconv.parallelize(net, mesh)
        net(torch.randn(2, 4, 8, 8))
        found[name] = net.saved > 0
    return found


@pytest.mark.parametrize("partition", ["sample=2", "height=2", "channel=2"])
def test_functions_save_something_where_those_of_torch_do(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert ranks(2).run(saving, partition) == [saving(None)] * 2


class Listing(nn.Module):
    """A checkpoint whose function keeps a list, and pads by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.seen = nn.Conv2d(1, 2, 3, padding=1), list[float]()

    def listed(self, x: Tensor) -> Tensor:
        self.seen.append(x.detach().mean().item())
        return F.pad(x + sum(self.seen), (0, 0, 0, 0), "reflect")

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.listed, self.first(x), use_reentrant=False)


def listed(partition: str | None) -> tuple[float, ...]:
    torch.manual_seed(0)
    net, x = Listing().double(), torch.randn(2, 1, 4, 4).double()
    if partition is not None:
        distconv.parallelize(net, distconv.init(partition, device_type="cpu"))
    for _ in range(2):
        loss = net(x).square().mean()
        loss.backward()
    return *net.seen, loss.item()


def test_a_checkpoint_computes_again_what_it_does_in_one_process(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(listed, "height=2"):
        assert found == pytest.approx(listed(None), rel=1e-12)
