"""What the parameters of a wide ResNet take on every rank: bytes held, and bytes that gradients' allreduces move."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import distconv
from distconv.agreement.ledger import finish_comparisons
from mucudnn.networks.models import ResNet

TITLE = "ResNet-18, width 16, widened 4 times"
PARTITIONS = ("sample=4", "sample=2,channel=2", "channel=4")
SHAPE = (4, 3, 64, 64)


def wide(partition: str) -> dict[str, Any]:
    """Bytes of one process and of every rank after a training step with Adam, and of this step's allreduces.

    Keys: ``whole`` and ``held`` (weights, gradients, optimizer state), ``reduced`` (handed to allreduces, per rank) and
    ``sent`` (what a ring allreduce of that sends from each rank: 2 (g - 1) / g of it among g ranks).
    """
    finish_comparisons(distconv.init(partition))  # else all ranks compare what is left, before this step
    torch.manual_seed(0)
    whole = 0
    if dist.get_rank() == 0:
        whole, _ = _step(ResNet(width=16, width_factor=4))
    dist.barrier()
    torch.manual_seed(0)
    held, reductions = _step(distconv.parallelize(ResNet(width=16, width_factor=4), distconv.init(partition)))
    mine = held, sum(size for size, _ in reductions), sum(2 * (g - 1) / g * size for size, g in reductions)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    shares, reduced, sent = zip(*everyone, strict=True)
    return {"whole": whole, "held": shares, "reduced": reduced, "sent": sent}


def _step(model: nn.Module) -> tuple[int, list[tuple[int, int]]]:
    """Bytes held after a step; (bytes, ranks) of every allreduce of gradients in it."""
    optimizer = torch.optim.Adam(model.parameters())
    y = model(torch.randn(SHAPE))
    found: list[tuple[int, int]] = []
    transport = dist.all_reduce

    def counting(tensor: Tensor, *rest: Any, group: Any = None, async_op: bool = False, **options: Any) -> Any:
        if async_op:  # only the allreduces of gradients are asynchronous: they run beside the backward pass
            found.append((tensor.nbytes, dist.get_world_size(group)))
        return transport(tensor, *rest, group=group, async_op=async_op, **options)

    dist.all_reduce = counting
    try:
        y.square().mean().backward()
    finally:
        dist.all_reduce = transport
    optimizer.step()
    parameters = list(model.parameters())
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    return _bytes([*parameters, *(p.grad for p in parameters if p.grad is not None), *state]), found


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory that the tensors lie in on this rank; tensors that share memory count once."""
    storages = ((t._local_tensor if isinstance(t, DTensor) else t).untyped_storage() for t in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
