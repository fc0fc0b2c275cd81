"""Random operators draw on ranks what they draw in one process: every number, and what the generator gives next."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from reference import random
from small_tensors import gathered_up_to
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import distconv
from distconv.rules.random import whole
from distconv.settings import options

pytestmark = pytest.mark.gloo


def from_another(x: Tensor) -> Tensor:
    """Numbers of a generator that the script has made, and what it gives next."""
    generator = torch.Generator().manual_seed(4)
    y = torch.bernoulli(x.sigmoid(), generator=generator) + torch.empty_like(x).normal_(generator=generator)
    return y + torch.rand((), generator=generator)


def classes(x: Tensor, count: int) -> Tensor:
    """Those of each pixel, where the tensor may not be gathered."""
    with gathered_up_to(0):
        return torch.multinomial(x.abs().movedim(1, -1).flatten(0, 2), count).to(x.dtype)


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "dropout of channels": lambda x: F.dropout2d(x, 0.5),
    "alpha dropout": lambda x: F.feature_alpha_dropout(F.alpha_dropout(x, 0.3, True), 0.3, True),
    "native dropout": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "uniform": lambda x: torch.rand_like(x) * x,
    "normal": torch.randn_like,
    "normal of another type": lambda x: torch.randn_like(x, dtype=torch.float32),
    "normal in place": lambda x: torch.empty_like(x).normal_(2.0, 3.0),
    "normal, rows first": lambda x: torch.randn_like(x.transpose(1, 2)),
    "normal of half of it": lambda x: x.clone()[..., 1:].normal_(),
    "normal by means": lambda x: torch.normal(x, 0.5),
    "normal by means and deviations": lambda x: torch.normal(x[:, :1], x.abs()),
    "normal by deviations": lambda x: torch.normal(0.5, x.abs()),
    "normal by plain means": lambda x: torch.normal(torch.zeros(*x.shape[1:], dtype=x.dtype), x.abs()),
    "integers": lambda x: torch.randint_like(x, 3, 1 << 40),
    "any integers": lambda x: torch.empty_like(x, dtype=torch.int64).random_(),
    "by a share": lambda x: torch.bernoulli(x, 0.3),
    "by shares": lambda x: torch.bernoulli(x.sigmoid()),
    "by shares in single": lambda x: torch.bernoulli(x.float().sigmoid()),
    "exponential": lambda x: torch.empty_like(x).exponential_(2.0),
    "Cauchy": lambda x: torch.empty_like(x).cauchy_(),
    "log-normal": lambda x: torch.empty_like(x).log_normal_(),
    "geometric": lambda x: torch.empty_like(x).geometric_(0.3),
    "of one sample": lambda x: x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(0.5) * x,
    "of what all ranks hold": lambda x: F.dropout(x.sum((0, 1, 2, 3))),
    "random slopes": lambda x: F.rrelu(x, training=True),
    "another generator": from_another,
    "classes of large tensors": lambda x: classes(x, 1),
    "several classes of large tensors": lambda x: classes(x, 2),
    "samples of classes": lambda x: torch.multinomial(x[:, :, 0, 0].abs(), 1).to(x.dtype),
}


@contextlib.contextmanager
def pieces_of(elements: int) -> Iterator[None]:
    with mock.patch.object(whole, "PIECE", elements):
        yield


def unlike(partition: str, shape: tuple[int, ...], last: bool, piece: int) -> list[str]:
    """The operators that draw something else than in one process, or leave another state."""
    mesh, wrong = distconv.init(partition, device_type="cpu"), []
    x = random(*shape).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    for name, function in OPERATORS.items():
        torch.manual_seed(3)
        torch.rand(5)
        expected, after = function(x), torch.get_rng_state()
        torch.manual_seed(3)
        torch.rand(5)
        with pieces_of(piece):
            found = function(distconv.shard(x, mesh))
        if found.dtype != expected.dtype or not torch.allclose(distconv.gather(found), expected, 1e-12, 0):
            wrong.append(f"{name}: numbers")
        if not torch.equal(torch.get_rng_state(), after):
            wrong.append(f"{name}: state")
    return wrong


@pytest.mark.parametrize("piece", [whole.PIECE, 50])
@pytest.mark.parametrize(
    "partition, shape, last",
    [
        ("sample=2,height=2", (3, 4, 5, 6), False),
        ("sample=2,height=2", (3, 4, 5, 6), True),
        ("sample=2,channel=2", (4, 5, 3, 7), False),
        ("sample=2,channel=2", (4, 5, 3, 7), True),
        ("height=4", (2, 4, 9, 7), False),  # the last rank has nothing
        ("height=4", (2, 4, 10, 7), True),
    ],
)
def test_operators_draw_what_one_process_draws(
    ranks: Callable[[int], Ranks], partition: str, shape: tuple[int, ...], last: bool, piece: int
) -> None:
    for wrong in ranks(4).run(unlike, partition, shape, last, piece):
        assert not wrong


class Noisy(nn.Module):
    """Dropout of elements, of channels and of the weights of attention, stochastic depth, noise, and recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.inner = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Dropout(0.2), nn.GELU())
        self.queries, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = self.queries(x.flatten(2).transpose(1, 2)).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.25)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout2d(self.first(x).relu(), 0.3)
        x = x + self.second(x) * torch.empty(x.shape[0], 1, 1, 1, dtype=x.dtype).bernoulli_(0.7)
        x = checkpoint(self.inner, x, use_reentrant=False) + torch.randn_like(x) * 0.1
        return self.head(F.dropout(self.attention(x).mean(1), 0.5))


def losses(model: nn.Module, x: Tensor, whole_of: Callable[[Tensor], Tensor]) -> Tensor:
    """Of some steps, and a number that is drawn afterwards."""
    torch.manual_seed(9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for _ in range(3):
        loss = whole_of(F.cross_entropy(model(x), torch.arange(len(x)) % 3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return torch.stack([*found, torch.rand((), dtype=torch.float64)])


def trained(partition: str, last: bool) -> float:
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(4)
    plain, x = Noisy().double(), random(5, 2, 6, 7)
    if last:
        plain, x = plain.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
    model = distconv.parallelize(copy.deepcopy(plain), mesh)
    expected = losses(plain, x, lambda loss: loss)
    return float((losses(model, x, distconv.gather) - expected).abs().max())


@pytest.mark.parametrize(
    "partition, last",
    [("sample=2,height=2", False), ("sample=2,channel=2", False), ("height=2,width=2", True)],
)
def test_losses_of_a_model_that_draws(ranks: Callable[[int], Ranks], partition: str, last: bool) -> None:
    for error in ranks(4).run(trained, partition, last):
        assert error < 1e-12


def undivided() -> tuple[bool, list[str], list[bool]]:
    """Whether a tensor below the bound is drawn whole by an operator that has no pieces; what is told of one above it,
    and whether the shards and the default generators of the ranks are alike.
    """
    x = distconv.shard(random(4, 3, 4, 4), distconv.init("sample=2", device_type="cpu"))
    with mock.patch.object(whole, "in_sequence", lambda *_: False), pieces_of(16):
        torch.manual_seed(3)
        equal = torch.equal(distconv.gather(torch.randn_like(x)), random_after(3, x.shape))
        with mock.patch.object(whole, "MOST_BYTES", 1000), warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.manual_seed(3)
            found, _ = (distconv.gather(torch.randn_like(x)) for _ in range(2))
    with options({"random": "apart"}):
        torch.manual_seed(3)
        apart = distconv.gather(torch.randn_like(x))
    return (
        equal,
        [str(each.message) for each in told],
        [torch.equal(found, apart), not torch.equal(found[:2], found[2:])],
    )


def random_after(seed: int, shape: Any) -> Tensor:
    torch.manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64)


def test_what_cannot_be_drawn_in_pieces(ranks: Callable[[int], Ranks]) -> None:
    for equal, told, apart in ranks(2).run(undivided):
        assert equal and all(apart)
        (line,) = told
        assert line.startswith("normal_ at ") and "test_random_numbers.py" in line and "apart" in line


def states(shape: tuple[int, ...]) -> Tensor:
    """The generator's state after numbers of a channels_last tensor of which one rank has nothing that shows this."""
    x = random(*shape).to(memory_format=torch.channels_last)
    torch.randn_like(distconv.shard(x, distconv.init("channel=2", device_type="cpu")))
    return torch.get_rng_state()


@pytest.mark.parametrize("channels", [1, 3])
def test_ranks_draw_the_same_where_one_cannot_see_the_format(ranks: Callable[[int], Ranks], channels: int) -> None:
    first, second = ranks(2).run(states, (3, channels, 3, 3))
    assert torch.equal(first, second)
