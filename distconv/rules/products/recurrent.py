"""Recurrent layers (LSTM, GRU, RNN): a rank runs its own samples through torch's own function, in one call.

A position of time depends on all before it, and each feature on all others. Where they are sharded, x trades these
shards for samples, if every rank gets some; else, and always among parts in turn, x is gathered, and one part computes
for all. y has the layout of x. With dropout between layers, which draws random numbers, torch's own steps are computed
one by one.

One part that computes for all does so a stretch of time at a time where nothing is kept for a backward: torch's kernel
writes out the gates of all positions, which may be the most that the whole call takes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.rules.operands.layouts import layout_beside
from distconv.rules.operands.once import as_operator, once, thread
from distconv.rules.operands.own_parts import as_own_part, wrapped
from distconv.rules.registry import above_autograd
from distconv.rules.schemas import operator
from distconv.tensors.layouts import find_layout, owners, placements_on, replicated
from distconv.transfer.redistribution import redistributed


def _by_samples(mesh: DeviceMesh, x: Tensor, batch: int) -> tuple[Placement, ...]:
    """The layout of x in which only samples are sharded, and every rank has one at least."""
    found = layout_beside(mesh, placements_on(x, mesh), tuple(x.shape), frozenset(range(x.dim())) - {batch})
    if thread.shared is not None and found != placements_on(x, mesh):
        return (Replicate(),) * mesh.ndim  # steps of few samples take the time of steps of all
    if found is None:
        found = tuple(p if p == Shard(batch) else Replicate() for p in placements_on(x, mesh))
    axes = [axis for axis, p in enumerate(found) if p.is_shard()]
    if not all(stop > start for start, stop in owners(mesh, axes, x.shape[batch])):
        found = (Replicate(),) * mesh.ndim
    return found


GATES = 4 << 20  # Bytes of the gates of a stretch of time: a call of the kernel for less would only cost time.


def _in_stretches(operate: Any, x: Tensor, hx: Any, weights: Sequence[Tensor], settings: Sequence[Any]) -> Any:
    """What a recurrent layer of one direction gives, computed a stretch of time at a time."""
    time = 1 if settings[-1] else 0
    position = x.shape[1 - time] * weights[0].shape[0] * x.element_size()
    found = []
    for stretch in x.split(max(GATES // max(position, 1), 1), time):
        y, *last = operate(stretch, hx, weights, *settings)
        hx = last if isinstance(hx, list) else last[0]
        found.append(y)
    return torch.cat(found, time), *last


def _recurrent(name: str, x: Tensor, hx: Any, params: Sequence[Tensor], *settings: Any) -> Any:
    """(y, last states...) of x (time, samples, features), or samples first, and states (layers, samples, features)."""
    _, layers, dropout, train, both_ways, batch_first = settings
    if dropout and train and layers > 1:
        return NotImplemented
    mesh, _ = find_layout(x, *(hx if isinstance(hx, list) else [hx]), *params)
    batch = 0 if batch_first else 1
    of_x = _by_samples(mesh, x, batch)
    of_states = tuple(Shard(1) if p.is_shard() else p for p in of_x)
    sharding = [axis for axis, p in enumerate(of_x) if p.is_shard()]
    states = [as_own_part(h, mesh, of_states) for h in (hx if isinstance(hx, list) else [hx])]
    weights = [as_own_part(each, mesh, (Replicate(),) * mesh.ndim, sharding) for each in params]

    def run(own: Tensor, *others: Tensor) -> Sequence[Tensor]:
        states, weights = list(others[:count]), others[count:]
        state = states if isinstance(hx, list) else states[0]
        if sharding or both_ways or torch.is_grad_enabled():
            return operator(name)(own, state, weights, *settings)
        return _in_stretches(operator(name), own, state, weights, settings)

    count = len(states)
    y, *last = (as_operator if sharding else once)(run, as_own_part(x, mesh, of_x), *states, *weights)
    shape = (*x.shape[:2], y.shape[2])
    whole = [wrapped(h, mesh, of_states, (h.shape[0], x.shape[batch], h.shape[2])) for h in last]
    return redistributed(wrapped(y, mesh, of_x, shape), mesh, placements_on(x, mesh)), *whole


for _name in ("lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input"):
    above_autograd(f"aten::{_name}")(functools.partial(_recurrent, _name))


def _packed(name: str, *args: Any) -> tuple[Tensor, ...]:
    """What torch's function gives for a packed sequence, in which samples of several lengths share dim 0: every rank
    computes all of it. Numbers of samples and lengths are plain tensors."""
    given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
    mesh, _ = find_layout(*(x for x in given if isinstance(x, DTensor)))

    def run(*tensors: Tensor) -> Sequence[Tensor]:
        at = iter(tensors)
        return operator(name)(*tree_map_only(Tensor, lambda _: next(at), args))

    found = once(run, *(as_own_part(x, mesh, replicated(mesh)) for x in given))
    return tuple(wrapped(x, mesh, replicated(mesh), x.shape) if x.is_floating_point() else x for x in found)


for _name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
    above_autograd(f"aten::{_name}.data")(functools.partial(_packed, f"{_name}.data"))
for _name in ("_pack_padded_sequence", "_pad_packed_sequence"):
    above_autograd(f"aten::{_name}")(functools.partial(_packed, _name))
