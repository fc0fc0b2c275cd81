"""Random operators, dropout's masks among them: every shard draws numbers of its own, replicas draw the same.

All ranks advance the default generator alike, by one number per call, so that what a script draws afterwards agrees.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.dtensors import wrap
from distconv.layouts import Layout, layout, refuse_partial
from distconv.mesh import sharded_dims
from distconv.refusal import refuse
from distconv.rules.reduction import settled
from distconv.rules.registry import rule
from distconv.transfer.local_part import local_as


@contextlib.contextmanager
def own_numbers(where: Layout, device: torch.device) -> Iterator[None]:
    """Random numbers within come from a generator state of this shard; then the default one continues."""
    mesh, placements = where
    seed = int(torch.randint(1 << 62, ()))
    for axis, _ in sharded_dims(mesh, placements):
        seed = (seed * 6364136223846793005 + 1442695040888963407 + mesh.get_local_rank(axis)) % (1 << 63)
    source: Any = torch.cuda if device.type == "cuda" else torch
    state = source.get_rng_state()
    try:
        source.manual_seed(seed)
        yield
    finally:
        source.set_rng_state(state)


def _check_generator(func: Any, generator: torch.Generator | None) -> None:
    if generator is not None:
        raise refuse(func, "a generator= of its own on a distributed tensor")


IN_PLACE = ("bernoulli_.float", "uniform_", "normal_", "exponential_", "random_", "random_.from", "random_.to")


@rule(*(f"aten::{name}" for name in IN_PLACE))
def draw_in_place(func: Any, x: DTensor, *args: Any, generator: torch.Generator | None = None) -> DTensor:
    """Fills x with random numbers."""
    _check_generator(func, generator)
    refuse_partial(func, x.placements, "its tensor")
    with own_numbers(layout(x), x._local_tensor.device):
        func(x._local_tensor, *args)
    return x


@rule(
    "aten::rand_like",
    "aten::randn_like",
    "aten::randint_like",
    "aten::randint_like.low_dtype",
    "aten::bernoulli",
    "aten::bernoulli.p",
)
def draw(func: Any, x: DTensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> DTensor:
    """Random numbers laid out as x is."""
    _check_generator(func, generator)
    local, (mesh, placements) = settled(func, x)
    with own_numbers((mesh, placements), local.device):
        drawn = func(local, *args, **kwargs)
    return wrap(drawn, mesh, placements, x.shape)


@rule("aten::native_dropout")
def native_dropout(func: Any, x: DTensor, p: float, train: bool | None) -> tuple[DTensor, DTensor]:
    """x with a share p of its elements zeroed, and the mask."""
    local, (mesh, placements) = settled(func, x)
    with own_numbers((mesh, placements), local.device):
        kept, mask = func(local, p, train)
    return wrap(kept, mesh, placements, x.shape), wrap(mask, mesh, placements, x.shape)


@rule("aten::native_dropout_backward")
def native_dropout_backward(func: Any, grad: Tensor, mask: DTensor, scale: float) -> DTensor:
    """The gradient where the mask kept an element."""
    mesh, placements = layout(mask)
    return wrap(func(local_as(grad, mesh, placements), mask._local_tensor, scale), mesh, placements, mask.shape)
