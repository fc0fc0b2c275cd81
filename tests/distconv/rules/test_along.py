"""Operators whose elements meet along some dims, and small tensors that are gathered, against one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from small_tensors import gathered_up_to
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import distconv
from distconv.rules.operands.layouts import layout_beside

pytestmark = pytest.mark.gloo


def symmetric(x: Tensor) -> Tensor:
    return x @ x.mT + 3 * torch.eye(x.shape[-2], dtype=x.dtype)


def many(x: Tensor) -> Tensor:
    """Points (N, 30, W) beside each other."""
    return x.flatten(1, 2)[:, [i % 15 for i in range(30)]]


def square(x: Tensor) -> Tensor:
    return x[:, :, :4, :4] * 1


def draws(x: Tensor, space: int = 2) -> Tensor:
    """Numbers from 0 to 1 for each map of x (N, C, ...)."""
    return random(x.shape[0], x.shape[1], space, seed=11).sigmoid()


ALONG: dict[str, Callable[[Tensor], Tensor]] = {
    "cumulative sum": lambda x: x.cumsum(2) + x.cumsum(0),
    "cumulative product": lambda x: x.cumprod(2),
    "product": lambda x: x.prod(2) + x.prod(2, keepdim=True).prod(),
    "product of complex numbers": lambda x: torch.view_as_real(torch.complex(x, x * 2).prod(2)),
    "cumulative maximum": lambda x: x.cummax(2)[0] + x.cummin(3)[0],
    "logarithms of sums": lambda x: x.logcumsumexp(2),
    "in place": lambda x: (x * 1).cumsum_(2),
    "sorted": lambda x: x.sort(2, descending=True)[0],
    "order": lambda x: x.detach().argsort(2),
    "median": lambda x: x.median(2)[0] + x.kthvalue(2, 2)[0],
    "median, kept": lambda x: x.nanmedian(2, keepdim=True)[0],
    "quantile": lambda x: x.quantile(0.3, 2)[:, :, None] * x.flatten(2).quantile(0.9, 2)[..., None, None],
    "quantile, kept": lambda x: x.quantile(0.5, -2, keepdim=True) + x.quantile(1.0, 1, keepdim=True),
    "quantile of no numbers": lambda x: torch.where(x > 1, torch.nan, x).detach().quantile(0.4, 2).nan_to_num(7.0),
    "gathered rows": lambda x: x.gather(2, x.detach().argsort(2)),
    "scattered rows": lambda x: torch.zeros_like(x).scatter_add(2, x.detach().argsort(2), x),
    "rows by number": lambda x: x.index_select(2, torch.tensor([2, 0, 0])),
    "rows added": lambda x: x.index_add(2, torch.tensor([1, 0]), x[:, :, :2] * 2),
    "rows added in place": lambda x: square(x).index_add_(2, torch.tensor([2, 0, 0, 1]), square(x).mT),
    "columns added in place": lambda x: square(x).index_add_(3, torch.tensor([2, 0, 0, 1]), square(x).mT),
    "rows filled": lambda x: x.index_fill(2, torch.tensor([1]), 3.0),
    "spectrum": lambda x: torch.fft.rfft2(x.detach()).abs(),
    "conjugates": lambda x: torch.view_as_real(torch.complex(x, x * 2).conj().flip(2)).prod(-1),
    "from conjugates": lambda x: torch.fft.ifft(torch.complex(x.detach(), x.detach()).conj(), dim=2).real,
    "spectrum of rows": lambda x: torch.fft.ifft(torch.fft.fft(x, dim=2) * 2, dim=2).real,
    "triangles": lambda x: x.triu() + x.tril(-1),
    "triangles of rows": lambda x: x[0, 0].triu(1) + x[0, 0].tril(-2) + torch.ones_like(x[0, 0]).triu_(),
    "distances of many": lambda x: torch.cdist(many(x), many(x) * 2 + 1),
    "pooled at random": lambda x: F.fractional_max_pool2d(x, 2, (3, 3), _random_samples=draws(x)),
    "pooled at random, a volume": lambda x: F.fractional_max_pool3d(
        x[:, None].expand(2, 4, -1, -1, -1), 2, (1, 2, 2), _random_samples=draws(x.new_zeros(2, 4), 3)
    ),
    "renormalised": lambda x: x.renorm(2, 1, 0.5),
    "unpooled": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "floored": lambda x: torch.fmax(x, x.flip(1)) + torch.fmin(x, x * 2) + (x * 1).clamp_min(x.flip(1)),
}
"""Of whatever size: an all-to-all at most, and never a gather."""

WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "inverse": lambda x: torch.linalg.inv(symmetric(x.flatten(1))),
    "singular values": lambda x: torch.linalg.svdvals(x),
    "distances": lambda x: torch.cdist(x.flatten(2), x.flatten(2) * 2),
    "histogram": lambda x: x.detach().histc(4),
    "strides": lambda x: x.as_strided((2, 3), (1, 2)),
    "chosen": lambda x: x.masked_select(x.detach() > 0),
    "median of all": lambda x: x.median(),
}
"""Small tensors only."""


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def compare(table: dict[str, Callable[[Tensor], Tensor]], partition: str, shape: tuple[int, ...], bytes: int) -> dict:
    """{operator: what differs from one process, in results and gradients}; tensors of so many bytes are small."""
    mesh = distconv.init(partition, device_type="cpu")
    wrong = {}
    for name, operator in table.items():
        alone = random(*shape, seed=5).requires_grad_()
        here = alone.detach().clone().requires_grad_()
        expected = operator(alone)
        with gathered_up_to(bytes):
            found = distconv.gather(operator(distconv.shard(here, mesh)))
        errors = [_error(found, expected)]
        if expected.requires_grad:
            weights = random(*expected.shape, seed=6)
            (expected * weights).sum().backward()
            with gathered_up_to(bytes):
                (found * weights).sum().backward()
            assert here.grad is not None and alone.grad is not None
            errors.append(_error(here.grad, alone.grad))
        if not max(errors) < 1e-9:
            wrong[name] = errors
    return wrong


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    return float((found.detach() - expected.detach()).abs().max() / expected.detach().abs().max().clamp(min=1e-3))


def compare_along(partition: str, shape: tuple[int, ...]) -> dict:
    return compare(ALONG, partition, shape, 0)


def compare_whole(partition: str, shape: tuple[int, ...]) -> dict:
    return compare(WHOLE, partition, shape, 1 << 20)


@pytest.mark.parametrize("partition, shape", [("height=4", (2, 3, 5, 6)), ("height=2,width=2", (2, 5, 7, 4))])
def test_operators_along_dims(ranks: Callable[[int], Ranks], partition: str, shape: tuple[int, ...]) -> None:
    for wrong in ranks(4).run(compare_along, partition, shape):
        assert not wrong


def test_small_tensors(ranks: Callable[[int], Ranks]) -> None:
    for wrong in ranks(4).run(compare_whole, "height=4", (2, 3, 5, 6)):
        assert not wrong


def refusals() -> dict[str, str]:
    x = distconv.shard(random(1, 1, 5, 1, seed=1), distconv.init("height=4", device_type="cpu"))
    said = {}
    for name, operator in (WHOLE | {"cumulative maximum": lambda x: x.cummax(2)}).items():
        try:
            with gathered_up_to(x.nbytes - 1):
                operator(x)
        except distconv.UnsupportedOperation as error:
            said[name] = str(error)
    return said


def test_larger_tensors_are_refused_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(4).run(refusals)
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].keys() >= {"cumulative maximum", "chosen", "median of all", "histogram"}


def products_gradients(partition: str) -> dict[str, list[Tensor]]:
    """{case: (gradient of one process, gradient over shards)} of products of zeros and what is no number."""
    mesh, found = distconv.init(partition, device_type="cpu"), {}
    for zeros in range(3):
        for name, product in (
            ("all", torch.prod),
            ("dim", lambda x: x.prod(2).sum()),
            ("other", lambda x: x.prod(1).sum()),
        ):
            x = random(2, 3, 5, 2, seed=zeros)
            x[1, 2, 3, 1] = float("nan")
            x[0, :zeros, 1, 0] = 0
            x[1, 1, 3, :zeros] = 0
            alone, here = x.clone().requires_grad_(), x.clone().requires_grad_()
            product(alone).backward()
            with gathered_up_to(0):
                distconv.gather(product(distconv.shard(here, mesh))).backward()
            assert alone.grad is not None and here.grad is not None
            found[f"{name}, {zeros} zeros"] = [alone.grad, here.grad]
    return found


def test_gradients_of_products_with_zeros_and_nan(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(4).run(products_gradients, "height=2,width=2"):
        for alone, here in found.values():
            torch.testing.assert_close(here, alone, equal_nan=True)


class FourByTwo:
    """Stands for a mesh of two axes."""

    def size(self, axis: int) -> int:
        return (4, 2)[axis]


@pytest.mark.parametrize(
    "placements, shape, combined, expected",
    [
        ((Shard(2), Shard(3)), (2, 8, 5, 5), {1}, (Shard(2), Shard(3))),
        ((Shard(2), Shard(3)), (2, 8, 5, 5), {2}, (Shard(1), Shard(3))),
        ((Shard(2), Shard(3)), (2, 8, 5, 5), {2, 3}, (Shard(1), Shard(0))),
        ((Shard(2), Shard(3)), (1, 1, 5, 5), {2, 3}, None),
        ((Shard(2), Replicate()), (1, 1, 5, 9), {2}, (Shard(3), Replicate())),
    ],
)
def test_shards_go_to_the_longest_other_dims(placements: tuple, shape: tuple, combined: set, expected: tuple) -> None:
    assert layout_beside(FourByTwo(), placements, shape, frozenset(combined)) == expected  # type: ignore[arg-type]
