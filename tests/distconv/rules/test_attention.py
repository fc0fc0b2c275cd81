"""Attention over sharded samples, heads and tokens against one process, in float64, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor

import distconv

pytestmark = pytest.mark.gloo

Attention = Callable[[Tensor], Tensor]


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def tokens(x: Tensor) -> Tensor:
    """(N, positions, C) of (N, C, space...)."""
    return x.flatten(2).transpose(1, 2)


def heads(x: Tensor, count: int = 4) -> Tensor:
    """(N, heads, positions, features) of (N, C, space...)."""
    return tokens(x).unflatten(-1, (count, -1)).transpose(1, 2)


def attended(x: Tensor, **options: Any) -> Tensor:
    """Attention of x to itself, as (N, positions, C)."""
    q, k, v = heads(x), heads(x * 1.5), heads(x.sin())
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2).flatten(2)


def positions(x: Tensor) -> int:
    return x.shape[2:].numel()


def allowed(x: Tensor) -> Tensor:
    """A mask in which one row forbids everything."""
    mask = random(positions(x), positions(x)) > -0.5
    mask[2] = False
    return mask


def pooled(x: Tensor) -> Tensor:
    return heads(F.avg_pool2d(x, 2))


FUSED: dict[str, Attention] = {
    "plain": attended,
    "scaled": lambda x: attended(x, scale=0.3),
    "causal": lambda x: attended(x, is_causal=True),
    "bool mask": lambda x: attended(x, attn_mask=allowed(x)),
    "bias": lambda x: attended(x, attn_mask=random(4, positions(x), positions(x))),
    "bias of samples": lambda x: attended(x, attn_mask=random(x.shape[0], 1, 1, positions(x))),
    "bias with a gradient": lambda x: attended(
        x, attn_mask=x.mean((2, 3)).sum(0)[:4, None, None] * random(positions(x))
    ),
    "grouped heads": lambda x: F.scaled_dot_product_attention(
        heads(x, 8), heads(x[:, ::4], 2), heads(x[:, 1::4], 2), enable_gqa=True
    ),
    "grouped heads, dropout that drops nothing": lambda x: F.scaled_dot_product_attention(
        heads(x, 8), heads(x[:, ::4], 2), heads(x[:, 1::4], 2), dropout_p=1e-30, enable_gqa=True
    ),
    "one head": lambda x: F.scaled_dot_product_attention(tokens(x), tokens(x), tokens(x * 2)),
    "to few keys": lambda x: F.scaled_dot_product_attention(heads(x), pooled(x), pooled(x) * 2),
    "of few queries": lambda x: F.scaled_dot_product_attention(pooled(x), heads(x), heads(x * 2)),
    "to text": lambda x: F.scaled_dot_product_attention(
        heads(x), random(x.shape[0], 4, 7, x.shape[1] // 4), random(x.shape[0], 4, 7, 5)
    ),
    "of one query": lambda x: F.scaled_dot_product_attention(
        random(x.shape[0], 4, 1, x.shape[1] // 4), heads(x), heads(x * 2), attn_mask=random(1, positions(x))
    ),
    "of channels": lambda x: F.scaled_dot_product_attention(*[heads(x).transpose(-2, -1)] * 3),
}


def written_out(x: Tensor) -> Tensor:
    q, k, v = heads(x), heads(x * 1.5), heads(x.sin())
    return ((q @ k.transpose(-2, -1) * 0.5 + random(4, positions(x), positions(x))).softmax(-1) @ v).transpose(1, 2)


def batched(x: Tensor) -> Tensor:
    q, k, v = (heads(y).flatten(0, 1) for y in (x, x * 1.5, x.sin()))
    scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=0.5)
    return torch.bmm(torch.baddbmm(random(1, 1, positions(x)), scores.softmax(-1), scores).softmax(-1), v)


def summed_by_name(x: Tensor) -> Tensor:
    q, k, v = heads(x), heads(x * 1.5), heads(x.sin())
    weights = torch.einsum("bhid,bhjd->bhij", q, k).softmax(-1)
    return torch.einsum("bhij,bhjd->bihd", weights, v)


WRITTEN_OUT: dict[str, Attention] = {
    "matmul": written_out,
    "bmm": batched,
    "einsum": summed_by_name,
    "of keys with values": lambda x: heads(x).softmax(-1) @ (heads(x * 2).softmax(-2).transpose(-2, -1) @ heads(x)),
    "to few keys": lambda x: (heads(x) @ pooled(x).transpose(-2, -1)).softmax(-1) @ pooled(x * 2),
    "of few queries": lambda x: (pooled(x) @ heads(x).transpose(-2, -1)).softmax(-1) @ heads(x * 2),
    "of one query": lambda x: (random(4, 1, x.shape[1] // 4) @ heads(x).transpose(-2, -1)).softmax(-1) @ heads(x),
    "by a matrix": lambda x: (
        tokens(x) @ random(x.shape[1], 6) + random(positions(x), positions(x)) @ tokens(x)[..., :6]
    ),
    "keys first": lambda x: (
        ((heads(x) @ heads(x * 2).transpose(-2, -1)).transpose(-2, -1).softmax(-2)).transpose(-2, -1) @ heads(x)
    ),
}


def compare(table: str, partition: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """{case: its errors} of those that differ from one process."""
    mesh = distconv.init(partition, device_type="cpu")
    wrong: dict[str, Any] = {}
    for name, function in TABLES[table].items():
        alone = random(*shape, seed=5).requires_grad_()
        here = alone.detach().clone().requires_grad_()
        try:
            expected, found = function(alone), function(distconv.shard(here, mesh))
            whole = distconv.gather(found)
            errors = [_error(whole, expected)]
            cotangent = random(*expected.shape, seed=6)
            (expected * cotangent).sum().backward()
            (whole * cotangent).sum().backward()
            errors.append(_error(here.grad, alone.grad))
            with torch.inference_mode():
                errors.append(_error(distconv.gather(function(distconv.shard(here.detach(), mesh))), expected))
        except Exception as error:
            error.add_note(f"in case {name!r} on {partition}")
            raise
        if not max(errors) < 1e-11:
            wrong[name] = errors
    return wrong


def _error(found: Tensor | None, expected: Tensor | None) -> float:
    assert found is not None
    assert expected is not None
    if found.shape != expected.shape:
        return float("inf")
    return float((found - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1e-3))


TABLES = {"fused": FUSED, "written out": WRITTEN_OUT}

PARTITIONS = [
    (4, "height=2,width=2", (2, 16, 5, 6)),
    (4, "height=4", (1, 16, 6, 3)),
    (4, "channel=4", (2, 16, 3, 5)),
    (4, "sample=2,channel=2", (3, 16, 4, 5)),
]


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("size, partition, shape", PARTITIONS, ids=[partition for _, partition, _ in PARTITIONS])
def test_attention_equals_one_process(
    ranks: Callable[[int], Ranks], table: str, size: int, partition: str, shape: tuple[int, ...]
) -> None:
    for rank, wrong in enumerate(ranks(size).run(compare, table, partition, shape)):
        assert not wrong, f"rank {rank}"
