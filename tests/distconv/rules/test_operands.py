"""Tensors of one operator that lie differently: which dim is sharded then, and the result, against one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from reference import differing, random
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from distconv.rules.operands.layouts import broadcast_result

pytestmark = pytest.mark.gloo


def map_of(x: Tensor) -> Tensor:
    """(rows, columns)."""
    return x.mean((0, 1))


def row_of(x: Tensor) -> Tensor:
    """(N, C, 1, W): one row, of which the first rank has it all."""
    return x[:, :, :1] * 2


def shorts(x: Tensor) -> Tensor:
    return (x.detach() * 9).to(torch.int16)


def written(x: Tensor) -> Tensor:
    return torch.mm(x, x.t(), out=torch.empty_like(x))


def written_to_plain(x: Tensor) -> list[Tensor]:
    """What operators write to plain tensors, in place and by ``out=``."""
    plain, index = functools.partial(torch.zeros, dtype=x.dtype), torch.arange(x.shape[1])
    with torch.no_grad():
        filled = plain(x.shape).fill_(x.sum())
        filled[0, 0] = x.mean()
        return [
            *(filled, plain(x.shape).index_add_(1, index, x)),
            *(torch.mul(x, 2, out=plain(x.shape)), torch.mean(x, (2, 3), out=plain(x.shape[:2]))),
            *torch.max(x, 1, out=(plain(x[:, 0].shape), torch.zeros(x[:, 0].shape, dtype=torch.int64))),
            *(torch.prod(x, 3, out=plain(x.shape[:3])), torch.cumsum(x, 2, out=plain(0))),
            *(F.normalize(x.mean((0, 2, 3)), dim=0, out=plain(len(index))), torch.cat([x, x], out=plain(0))),
            *(torch.mean(x, 1, out=x[:, 0] * 1), torch.norm(x, 2, (0, 2), out=plain(x[0, :, 0].shape))),
        ]


CONFLICTS: dict[str, Callable[[Tensor], Any]] = {
    "sum of rows and columns": lambda x: x + x.transpose(2, 3),
    "where": lambda x: torch.where(x.transpose(1, 2) > 0, x, x.transpose(2, 3)),
    "outer product": lambda x: x.mean((1, 3))[:, :, None] * x.mean((1, 3))[:, None],
    "outer sum": lambda x: x.mean((0, 1, 3)) + x[..., :1],
    "in place": lambda x: (x * 1).add_(x.transpose(2, 3)).mul_(x.mean((0, 1, 3))),
    "products": lambda x: [map_of(x) @ map_of(x), map_of(x) @ map_of(x).t(), map_of(x).t() @ map_of(x)],
    "sum with a product": lambda x: torch.addmm(map_of(x).t(), map_of(x), map_of(x).t(), alpha=2),
    "written to a tensor": lambda x: written(map_of(x).detach()),
    "written to plain tensors": written_to_plain,
    "one row": lambda x: [row_of(x).mT @ row_of(x), x * row_of(x), x @ row_of(x).mT, row_of(x) @ x.mT],
    "small integers": lambda x: [shorts(x).amax(2), shorts(x).sum(2), shorts(x).argmin(3), shorts(x).cumsum(2)],
    "equal": lambda x: torch.tensor([torch.equal(x, x * 1), torch.equal(x, x + (x == x.max()))]),
    "products of samples": lambda x: [
        torch.einsum("nchw,mchw->nm", x, x),
        torch.einsum("nchw,hk->nckw", x, random(x.shape[2], 3)),
    ],
    "batches": lambda x: [x @ x.transpose(1, 2), torch.einsum("nchw,ncwh->nc", x, x.transpose(1, 2))],
}


def compare(partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    return differing(CONFLICTS, partition, shape)


@pytest.mark.parametrize(
    "partition, shape",
    [("height=4", (2, 5, 5, 5)), ("height=2,width=2", (2, 5, 5, 5)), ("channel=2,height=2", (2, 3, 3, 3))],
)
def test_operands_that_lie_differently(ranks: Callable[[int], Ranks], partition: str, shape: tuple[int, ...]) -> None:
    for wrong in ranks(4).run(compare, partition, shape):
        assert not wrong


WHOLE = Replicate()


class FourByTwo:
    """Stands for a mesh of two axes."""

    shape = (4, 2)


@pytest.mark.parametrize(
    "operands, shape, expected",
    [
        # The first tensor's, where both would move as much.
        ([((Shard(1), WHOLE), (8, 8)), ((Shard(0), WHOLE), (8, 8))], (8, 8), (Shard(1), WHOLE)),
        # The larger tensor's; the smaller one comes whole.
        ([((Shard(0), WHOLE), (8,)), ((Shard(0), Shard(1)), (9, 8))], (9, 8), (Shard(0), Shard(1))),
        # An axis that shards a single element shards the longer dim beside it.
        ([((Shard(1), WHOLE), (8, 1)), ((WHOLE, WHOLE), (8, 8))], (8, 8), (Shard(1), WHOLE)),
    ],
)
def test_what_moves_least_is_chosen(operands: list, shape: tuple, expected: tuple) -> None:
    assert broadcast_result(FourByTwo(), tuple(operands), shape) == expected  # type: ignore[arg-type]
