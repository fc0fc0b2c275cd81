"""Cuts a layer's input that every rank has whole, in the layout of the layer's gradient.

A tensor that is replicated before a layer may be sharded after it, beside sharded tensors. Then the layer's backward
gets a sharded gradient. Each rank cuts its part of the input, and no gradient is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from distconv.tensors.dtensors import wrap
from distconv.transfer.local_part import local_as


def as_gradient(placements: Sequence[Placement], grad: Tensor, parameters: int | None = 1) -> tuple[Placement, ...]:
    """The layout of x in backward: where every rank has it whole, a slice of it, if the gradient is sharded there.

    Not by the dim whose parameters every rank has whole, too: by default the channels.
    """
    if not isinstance(grad, DTensor):
        return tuple(placements)
    return tuple(
        of if p.is_replicate() and isinstance(of, Shard) and of.dim != parameters else p
        for p, of in zip(placements, grad.placements, strict=True)
    )


def cut_as_gradient(x: DTensor, grad: Tensor) -> DTensor:
    """x of a layer without parameters, cut so."""
    if not isinstance(grad, DTensor) or x.device_mesh != grad.device_mesh:
        return x
    target = as_gradient(x.placements, grad, None)
    return x if target == x.placements else wrap(local_as(x, x.device_mesh, target), x.device_mesh, target, x.shape)
