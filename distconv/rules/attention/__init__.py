"""Scaled dot product attention of sharded samples, heads and tokens, as one unit: no rank has all scores.

torch decomposes ``scaled_dot_product_attention`` above autograd, into an operator that depends on the device, the
shapes and the program's choice of a backend. distconv takes it as one unit before that. A plan decides how its tensors
are laid out, for each mesh axis, and then each rank computes its own part: with torch's own attention, whichever
backend that is, where it has the keys, and in blocks where other ranks own some.

A rank computes whole samples and heads where an axis shards those, and otherwise its own queries. Where an axis shards
queries and keys, the keys and values travel, one block at a time. Where it shards keys but not queries, which are few
then, every rank attends to its own keys, and the results are combined. Features are never sharded meanwhile: an axis
that shards them moves to the heads if it divides them, else to the tokens, and the result moves back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

from distconv.rules.attention.blockwise import Blockwise, BlockwiseAttention, rotation
from distconv.rules.operands.layouts import broadcast_layout
from distconv.rules.operands.own_parts import apply, as_own_part, wrapped
from distconv.rules.registry import above_autograd, rule
from distconv.rules.stock import stock
from distconv.tensors.deferred import all_computed
from distconv.tensors.layouts import boxes_along, find_layout, local_box, placements_on
from distconv.tensors.refusal import refuse
from distconv.transfer.redistribution import redistributed
from distconv.transfer.tracing import planned


@above_autograd("aten::scaled_dot_product_attention")
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale q k^T + mask) v of DTensors or plain tensors, laid out as q is. Differentiable."""
    query, key, value = _same_dims(query, key, value, enable_gqa)
    _check(query, key, value, attn_mask, is_causal)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if dropout_p > 0:
        return _with_dropout(query, key, value, attn_mask, dropout_p, is_causal, scale)
    mesh, _ = find_layout(query, key, value, attn_mask)
    given = (query, key, value, attn_mask)
    operands = (None if x is None else AttentionOperand(tuple(x.shape), placements_on(x, mesh)) for x in given)
    plan = make_attention_plan(mesh, *operands)
    tokens = Shard(query.dim() - 2)
    of_query, of_key = plan.query, plan.key
    shared = [axis for axis in range(mesh.ndim) if of_query[axis] == tokens and of_key[axis].is_replicate()]
    q = as_own_part(query, mesh, of_query, plan.combined)
    k, v = as_own_part(key, mesh, of_key, shared), as_own_part(value, mesh, of_key, shared)
    mask = None
    if attn_mask is not None and plan.mask is not None:
        distinct = [axis for axis, p in enumerate(plan.mask) if p.is_replicate() and isinstance(of_query[axis], Shard)]
        mask = as_own_part(attn_mask, mesh, plan.mask, [*distinct, *plan.combined])
    if plan.travelled or plan.combined or (is_causal and shared):
        work = _blockwise(mesh, plan, query, key, is_causal, scale)
        result = apply(BlockwiseAttention, q, k, v, mask, work)
    else:
        result = functional.scaled_dot_product_attention(
            q, k, v, all_computed(mask), is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    whole = wrapped(result, mesh, of_query, (*query.shape[:-1], value.shape[-1]))
    return redistributed(whole, mesh, plan.result)


def _blockwise(
    mesh: DeviceMesh, plan: AttentionPlan, query: Tensor, key: Tensor, causal: bool, scale: float
) -> Blockwise:
    dim = query.dim() - 2
    of_keys, of_rows = (
        boxes_along(mesh, placements, x.shape, plan.travelled)
        for placements, x in ((plan.key, key), (plan.query, query))
    )
    ends = tuple(box[dim][1] if causal else key.shape[dim] for box in of_rows)
    turns = rotation(mesh, plan.travelled, dim, tuple(box[dim] for box in of_keys), ends)
    own = local_box(mesh, plan.query, query.shape)[dim]
    return Blockwise(scale, causal, own, turns, mesh, plan.combined)


def _same_dims(query: Tensor, key: Tensor, value: Tensor, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """With as many dims, and the same extents before the tokens, but for heads that are grouped."""
    ndim = max(x.dim() for x in (query, key, value))
    tensors = [x if x.dim() == ndim else x[(None,) * (ndim - x.dim())] for x in (query, key, value)]
    lead = max(ndim - 3, 0) if grouped else max(ndim - 2, 0)
    if any(x.shape[:lead] != tensors[0].shape[:lead] for x in tensors):
        outer = torch.broadcast_shapes(*(x.shape[:lead] for x in tensors))
        tensors = [x if x.shape[:lead] == outer else x.expand(*outer, *x.shape[lead:]) for x in tensors]
    first, second, third = tensors
    return first, second, third


def _check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> None:
    shapes = f"queries {tuple(query.shape)}, keys {tuple(key.shape)} and values {tuple(value.shape)}"
    if query.dim() < 2 or query.shape[-1] != key.shape[-1] or key.shape[:-1] != value.shape[:-1]:
        raise RuntimeError(f"scaled_dot_product_attention of {shapes}")
    if query.dim() > 2 and (query.shape[-3] % max(key.shape[-3], 1) or query.shape[:-3] != key.shape[:-3]):
        raise RuntimeError(f"scaled_dot_product_attention of {shapes}: the heads do not divide into groups")
    if mask is None:
        return
    if causal:
        raise RuntimeError("scaled_dot_product_attention: a mask together with is_causal=True")
    if mask.dim() > query.dim() or any(
        extent not in (1, of)
        for extent, of in zip(reversed(mask.shape), reversed((*query.shape[:-1], key.shape[-2])), strict=False)
    ):
        raise RuntimeError(f"scaled_dot_product_attention of {shapes} with a mask {tuple(mask.shape)}")


def _with_dropout(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float
) -> Tensor:
    """Written out, as dropout acts on the weights: each rank draws numbers of its own for its rows."""
    if key.dim() > 2 and key.shape[-3] != query.shape[-3]:
        each = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(each, -3), value.repeat_interleave(each, -3)
    scores = torch.matmul(query * scale, key.transpose(-2, -1))
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=query.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(functional.dropout(torch.softmax(scores, -1), p), value)


BACKENDS = (
    *("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"),
    "fused_attention_overrideable",
)


@rule(*(f"aten::_scaled_dot_product_{name}{way}" for name in BACKENDS for way in ("", "_backward")))
def backend(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An attention by one backend, of whole tensors."""
    shards = [x for x in args if isinstance(x, DTensor) and any(not p.is_replicate() for p in x.placements)]
    if shards:
        raise refuse(
            func,
            f"it attends to a tensor {tuple(shards[0].shape)} laid out as {shards[0].placements}; accepted:"
            f" torch.nn.functional.scaled_dot_product_attention, with the same backend chosen by torch.nn.attention",
        )
    return stock(func, args, kwargs)


Shape = tuple[int, ...]
Placements = tuple[Placement, ...]


@dataclass(frozen=True)
class AttentionOperand:
    """The shape of a tensor, and its layout."""

    shape: Shape
    placements: Placements


@dataclass(frozen=True)
class AttentionPlan:
    """The layout of each tensor during the attention, and the axes along which other ranks own keys and values."""

    query: Placements
    key: Placements  # The layout of the keys and of the values.
    mask: Placements | None
    result: Placements  # The layout of the result after its move to the queries' original layout.
    travelled: tuple[int, ...]  # The axes along which the ranks have different queries and different keys.
    combined: tuple[int, ...]  # The axes along which they have the same queries and different keys.


BATCH, TOKENS, FEATURES, WHOLE = "batch", "tokens", "features", "whole"


def _role(placement: Placement, ndim: int) -> str:
    if not isinstance(placement, Shard):
        return WHOLE
    return {ndim - 2: TOKENS, ndim - 1: FEATURES}.get(placement.dim, BATCH)


@planned(1024)
def make_attention_plan(
    mesh: DeviceMesh,
    query: AttentionOperand,
    key: AttentionOperand,
    value: AttentionOperand,
    mask: AttentionOperand | None,
) -> AttentionPlan:
    """The plan for queries (..., heads, L, E), keys (..., groups of heads, S, E) and values (..., groups of heads, S,
    Ev); a mask broadcasts to (..., heads, L, S)."""
    ndim = len(query.shape)
    tokens, heads = Shard(ndim - 2), Shard(ndim - 3)
    ways: list[tuple[Placement, Placement, Placement]] = []
    for axis in range(mesh.ndim):
        if mesh.size(axis) == 1:
            ways.append((Replicate(), Replicate(), Replicate()))
            continue
        q, k, v = query.placements[axis], key.placements[axis], value.placements[axis]
        k = k if isinstance(k, Shard) else v
        m = Replicate() if mask is None else _towards(mask, mask.placements[axis], ndim)
        how = _role(q, ndim), _role(k, ndim), _role(m, ndim)
        few: Placement = tokens if query.shape[-2] >= mesh.size(axis) else Replicate()
        q, k = _placed(how, q, k, m, tokens, heads if ndim > 2 else few)
        if q == k and isinstance(q, Shard) and q != tokens:
            ranks = mesh.size(axis) * math.prod(mesh.size(a) for a, p in enumerate(query.placements[:axis]) if p == q)
            grouped = query.shape[q.dim] != key.shape[q.dim]
            if (grouped or how[0] == FEATURES) and key.shape[q.dim] % ranks:
                q, k = few if how[0] == FEATURES else tokens, tokens
        ways.append((q, k, query.placements[axis] if how[0] == FEATURES else q))
    queries, keys, result = zip(*ways, strict=True)
    distributed = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and keys[axis] == tokens]
    return AttentionPlan(
        queries,
        keys,
        None if mask is None else broadcast_layout(mask.shape, queries, (*query.shape[:-1], key.shape[-2])),
        result,
        tuple(axis for axis in distributed if queries[axis] == tokens),
        tuple(axis for axis in distributed if queries[axis] != tokens),
    )


def _placed(
    how: tuple[str, str, str], q: Placement, k: Placement, m: Placement, tokens: Shard, spread: Placement
) -> tuple[Placement, Placement]:
    """The placements of queries and keys along one axis. ``spread``: that of queries whose features are sharded."""
    of_queries, of_keys, of_mask = how
    if of_queries == BATCH:
        return q, q
    if of_queries == TOKENS:
        return q, Replicate() if of_keys == WHOLE else tokens
    if of_queries == FEATURES:
        return spread, spread if isinstance(spread, Shard) else tokens
    if of_keys == BATCH:
        return k, k
    if of_keys != WHOLE:
        return Replicate(), tokens
    if of_mask == BATCH:
        return m, m
    return (tokens, Replicate()) if of_mask == TOKENS else (Replicate(), Replicate())


def _towards(mask: AttentionOperand, placement: Placement, ndim: int) -> Placement:
    """A placement of the mask, as one of the scores that it broadcasts to."""
    if not isinstance(placement, Shard) or mask.shape[placement.dim] == 1:
        return Replicate()
    return Shard(placement.dim + ndim - len(mask.shape))
