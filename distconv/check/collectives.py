"""A process group whose other ranks do not exist: collectives complete at once, and nothing is sent."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.utils._pytree import tree_leaves

from distconv.transfer import group_calls
from mucudnn.process import substituted


class _Ended:
    """A collective that has ended."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


@contextlib.contextmanager
def alone(ranks: int, sent: Callable[[int], None]) -> Iterator[None]:
    """A context in which this process is rank 0 of a number of ranks; ``sent`` gets the bytes of every all-to-all.

    Received numbers are zero. torch's own stand-in refuses an all-to-all in which a rank sends nothing.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def all_to_all(
        output: Tensor,
        input: Tensor,
        received: Any = None,
        sizes: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> _Ended:
        output.zero_()
        counts = sizes or [input.shape[0] // dist.get_world_size(group)] * dist.get_world_size(group)
        sent(input.element_size() * _other(counts, group))
        return _Ended()

    if not dist.is_initialized():  # it stays: plans that are kept name its groups
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with substituted(dist, all_to_all_single=all_to_all), substituted(group_calls, all_to_all_single=all_to_all):
        yield


def bytes_sent(func: Any, args: Sequence[Any]) -> int:
    """Bytes that this rank sends in one of torch's collectives with ring algorithms; 0 for any other operator."""
    name = func._schema.name
    if not name.startswith(("c10d::", "_c10d_functional::")) or func not in collective_ops - sync_ops:
        return 0
    group = CollectiveOp.get_process_group(func, args)
    ranks = group.size()
    if "all_to_all_single" in name:  # as in a graph: (input, received, sent, group)
        return args[0].element_size() * _other(args[2], group) * math.prod(args[0].shape[1:])
    if "allreduce" in name or "all_reduce" in name:
        return 2 * _bytes(args[0]) * (ranks - 1) // ranks
    if "gather" in name:
        return _bytes(args[1] if name.startswith("c10d::") else args[0]) * (ranks - 1)
    if "reduce_scatter" in name:
        return _bytes(args[1] if name.startswith("c10d::") else args[0]) * (ranks - 1) // ranks
    return 0


def _other(sizes: Sequence[int], group: dist.ProcessGroup | None) -> int:
    """The part that leaves this rank."""
    return sum(sizes) - sizes[dist.get_rank(group)]


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tree_leaves(tensors) if isinstance(x, Tensor))
