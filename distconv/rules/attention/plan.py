"""Plan of an attention: the layouts of queries, keys, values and mask, decided for each mesh axis from layouts and
shapes.

A rank computes whole samples and heads where an axis shards those, and otherwise its own queries. Where an axis shards
queries and keys, the keys and values travel, one block at a time. Where it shards keys but not queries, which are few
then, every rank attends to its own keys, and the results are combined. Features are never sharded meanwhile: an axis
that shards them moves to the heads if it divides them, else to the tokens, and the result moves back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

from distconv.transfer.tracing import planned

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
    queries: list[Placement] = []
    keys: list[Placement] = []
    masks: list[Placement] = []
    result: list[Placement] = []
    for axis in range(mesh.ndim):
        if mesh.size(axis) == 1:
            for of in (queries, keys, masks, result):
                of.append(Replicate())
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
        queries.append(q)
        keys.append(k)
        masks.append(Replicate() if mask is None else _beside(mask, q, ndim))
        own = query.placements[axis]
        result.append(own if how[0] == FEATURES else q)
    distributed = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and keys[axis] == tokens]
    return AttentionPlan(
        tuple(queries),
        tuple(keys),
        None if mask is None else tuple(masks),
        tuple(result),
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


def _beside(mask: AttentionOperand, placement: Placement, ndim: int) -> Placement:
    """The placement of the mask along an axis on which the queries have ``placement``: its columns are whole."""
    dim = placement.dim - (ndim - len(mask.shape)) if isinstance(placement, Shard) else -1
    return Shard(dim) if dim >= 0 and mask.shape[dim] > 1 else Replicate()
