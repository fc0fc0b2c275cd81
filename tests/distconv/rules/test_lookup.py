"""x[numbers] and x[numbers] = values over shards, without a gather: results and gradients of one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from reference import random
from small_tensors import gathered_up_to
from torch import Tensor

import distconv

pytestmark = pytest.mark.gloo

NUMBERS, PAIR = torch.tensor([2, 0, 2, -1, 1]), torch.tensor([[0], [1]])


def put(x: Tensor, key: tuple, values: Tensor, accumulate: bool) -> Tensor:
    y = x * 1
    return y.index_put_(key, values, accumulate=accumulate)


def biased(x: Tensor, table: Tensor) -> Tensor:
    """Scores with a bias of relative positions, as windowed attention has."""
    rows = x.flatten(2)
    n = rows.shape[-1]
    at = (torch.arange(n)[:, None] - torch.arange(n)).abs().reshape(-1) % table.shape[0]
    bias = table[at].view(n, n, -1).permute(2, 0, 1)
    return (rows.mT @ rows)[:, None] + bias


CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "rows": lambda x, t: x[:, :, NUMBERS],
    "columns": lambda x, t: x[..., NUMBERS],
    "channels and columns": lambda x, t: x[:, PAIR, :, NUMBERS[:4] % 2],
    "of a table": lambda x, t: t[NUMBERS],
    "bias": biased,
    "numbers of shards": lambda x, t: t[(x.detach() > 0).long()] * x[..., None],
    "rows by frequency": lambda x, t: (
        x[..., None] * F.embedding((x.detach().mean(1) > 0).long(), t, scale_grad_by_freq=True)[:, None]
    ),
    "flattened numbers as a map": lambda x, t: (
        F.embedding(
            (x.detach().permute(0, 2, 3, 1).flatten(0, 2).mean(1) > 0).long().view(len(x), *x.shape[2:]), t
        ).permute(0, 3, 1, 2)
        * x[:, :1]
    ),
    "numbers of two dims": lambda x, t: t[(x.detach() > 0).long(), 1] * x,
    "of a vector": lambda x, t: t[:, 0][x.detach().argmax(2) % 3] * x[:, :, 0],
    "rows put": lambda x, t: put(x, (torch.tensor([1, 0]),), x[:2] * 3, False),
    "added to rows": lambda x, t: torch.zeros_like(x).index_put((torch.tensor([1, 1]),), x[:2], accumulate=True),
    "added from shards": lambda x, t: t.index_put((torch.arange(5) % 3,), x[0, 0, :5, :4], accumulate=True),
    "one number": lambda x, t: put(x, (torch.tensor(1),), torch.tensor(2.0, dtype=x.dtype), False),
}


def compare(partition: str, shape: tuple[int, ...]) -> dict[str, list[float]]:
    """{case: errors of result and gradients} of those that are off."""
    mesh = distconv.init(partition, device_type="cpu")
    wrong = {}
    for name, case in CASES.items():
        x, table = random(*shape), random(3, 4, seed=8)
        alone = [x.clone().requires_grad_(), table.clone().requires_grad_()]
        here = [x.clone().requires_grad_(), table.clone().requires_grad_()]
        expected = case(*alone)
        weights = random(*expected.shape, seed=9)
        (expected * weights).sum().backward()
        with gathered_up_to(0):
            found = case(distconv.shard(here[0], mesh), here[1])
            whole = distconv.gather(found)
            (whole * weights).sum().backward()
        pairs = [(whole, expected), *((a.grad, b.grad) for a, b in zip(here, alone, strict=True) if b.grad is not None)]
        errors = [
            float("inf") if a is None or a.shape != b.shape else float((a - b).detach().abs().max()) for a, b in pairs
        ]
        if not max(errors) < 1e-10:
            wrong[name] = errors
    return wrong


@pytest.mark.parametrize(
    "partition, shape",
    [
        ("height=4", (2, 3, 5, 4)),
        ("height=2,width=2", (2, 3, 5, 4)),
        ("sample=2,channel=2", (3, 3, 5, 4)),
        ("channel=4", (2, 3, 5, 4)),
    ],
)
def test_lookups_equal_one_process(ranks: Callable[[int], Ranks], partition: str, shape: tuple[int, ...]) -> None:
    for wrong in ranks(4).run(compare, partition, shape):
        assert not wrong
