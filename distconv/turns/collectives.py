"""Computes collectives among parts: each function takes the arguments of all members, and writes the outputs here."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor


class CollectiveArguments(NamedTuple):
    """The arguments of one member: tensors to read, tensors to write, and numbers such as a root or sizes."""

    inputs: Sequence[Tensor] = ()
    outputs: Sequence[Tensor] = ()
    numbers: Any = None


_REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}


def reduced(tensors: Sequence[Tensor], op: Any) -> Tensor:
    """The reduction of tensors, in their order; of half types in float32, rounded once."""
    kind = next((known for known in _REDUCTIONS if op == known), None)
    if kind is None:
        raise ValueError(f"reduction {op}: accepted: {', '.join(map(str, _REDUCTIONS))}")
    dtype = tensors[0].dtype
    if dtype in (torch.float16, torch.bfloat16):
        tensors = [tensor.float() for tensor in tensors]
    total = functools.reduce(_REDUCTIONS[kind], tensors)
    if kind == dist.ReduceOp.AVG:
        total = total / len(tensors)
    return total.to(dtype)


def all_reduce(members: Sequence[CollectiveArguments], here: Sequence[int]) -> None:
    """Every member's tensors become the reduction; ``numbers``: the operation."""
    for tensors in zip(*(member.inputs for member in members), strict=True):
        total = reduced(tensors, members[0].numbers)
        for at in here:
            tensors[at].copy_(total)


def broadcast(members: Sequence[CollectiveArguments], here: Sequence[int]) -> None:
    """Every member's outputs become the root's inputs, which are also its outputs; ``numbers``: the root."""
    root = members[0].numbers
    for at in here:
        for tensor, source in zip(members[at].outputs, members[root].inputs, strict=True) if at != root else ():
            tensor.copy_(source)


def all_gather(members: Sequence[CollectiveArguments], here: Sequence[int]) -> None:
    """Every member gets the input of each, in as many outputs."""
    for at in here:
        for output, source in zip(members[at].outputs, members, strict=True):
            output.copy_(source.inputs[0].view(output.shape))


def all_gather_single(members: Sequence[CollectiveArguments], here: Sequence[int]) -> None:
    """Every member gets the inputs of all, one after another."""
    first, *others = here
    for index, made in enumerate(members[first].outputs):
        torch.cat([source.inputs[index].view(-1) for source in members], out=made.view(-1))
        for other in others:
            members[other].outputs[index].view(-1).copy_(made.view(-1))


def reduce_scatter_single(members: Sequence[CollectiveArguments], here: Sequence[int]) -> None:
    """Every member gets its part of the reduction; ``numbers``: the operation."""
    for index in range(len(members[here[0]].outputs)):
        total = reduced([member.inputs[index].reshape(-1) for member in members], members[0].numbers)
        shares = total.chunk(len(members))
        for at in here:
            output = members[at].outputs[index]
            output.copy_(shares[at].view(output.shape))


def barrier(members: Sequence[CollectiveArguments], here: Sequence[int]) -> None:
    """Nothing moves."""


def received(given: CollectiveArguments) -> int:
    """The bytes that a member gets in a collective."""
    return sum(x.nbytes for x in given.outputs or given.inputs)
