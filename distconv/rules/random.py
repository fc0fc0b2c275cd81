"""Random operators, dropout's masks among them: every shard draws numbers of its own, replicas draw the same.

All ranks advance the default generator alike, by one number per call, so that what a script draws afterwards agrees.

In a graph that number has no value yet. There an operator of distconv's own, ``distconv::drawn``, is given it when the
graph runs, and draws what would be drawn without a compiler.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
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
from distconv.transfer.tracing import is_traced


def _coordinates(where: Layout) -> list[int]:
    """Which shard of a tensor this rank has."""
    mesh, placements = where
    return [mesh.get_local_rank(axis) for axis, _ in sharded_dims(mesh, placements)]


@contextlib.contextmanager
def _numbers_of(seed: int, coordinates: Sequence[int], device: torch.device) -> Iterator[None]:
    for coordinate in coordinates:
        seed = (seed * 6364136223846793005 + 1442695040888963407 + coordinate) % (1 << 63)
    source: Any = torch.cuda if device.type == "cuda" else torch
    state = source.get_rng_state()
    try:
        source.manual_seed(seed)
        yield
    finally:
        source.set_rng_state(state)


def own_numbers(where: Layout, device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Random numbers within come from a generator state of this shard; then the default one continues."""
    return _numbers_of(int(torch.randint(1 << 62, ())), _coordinates(where), device)


_library = torch.library.Library("distconv", "DEF")
_library.define("drawn(Tensor seed, int[] coordinates, Tensor like, str name, Scalar[] arguments) -> Tensor")


@torch.library.impl(_library, "drawn", "CompositeExplicitAutograd")
def _drawn(seed: Tensor, coordinates: list[int], like: Tensor, name: str, arguments: list[float]) -> Tensor:
    """A tensor like another, which an operator in place fills with random numbers of this shard."""
    packet, _, overload = name.partition(".")
    result = torch.empty_like(like)
    with _numbers_of(int(seed), coordinates, like.device):
        getattr(getattr(torch.ops.aten, packet), overload or "default")(result, *arguments)
    return result


@torch.library.register_fake("distconv::drawn", lib=_library)  # type: ignore[untyped-decorator]
def _drawn_without_values(seed: Tensor, coordinates: Any, like: Tensor, name: str, arguments: Any) -> Tensor:
    return torch.empty_like(like)


def _draw(where: Layout, like: Tensor, name: str, *arguments: float) -> Tensor:
    """The same, of a graph."""
    seed = torch.randint(1 << 62, ())
    result: Tensor = torch.ops.distconv.drawn(seed, _coordinates(where), like, name, arguments)
    return result


def _check_generator(func: Any, generator: torch.Generator | None) -> None:
    if generator is not None:
        raise refuse(func, "a generator= of its own on a distributed tensor")


IN_PLACE = ("bernoulli_.float", "uniform_", "normal_", "exponential_", "random_", "random_.from", "random_.to")


@rule(*(f"aten::{name}" for name in IN_PLACE))
def draw_in_place(func: Any, x: DTensor, *args: Any, generator: torch.Generator | None = None) -> DTensor:
    """Fills x with random numbers."""
    _check_generator(func, generator)
    refuse_partial(func, x.placements, "its tensor")
    local = x._local_tensor
    if is_traced(local):
        name = func._schema.name.removeprefix("aten::")
        overload = func._schema.overload_name
        local.copy_(_draw(layout(x), local, f"{name}.{overload}" if overload else name, *args))
    else:
        with own_numbers(layout(x), local.device):
            func(local, *args)
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
    if is_traced(local):
        drawn = _drawn_in_graph(func, (mesh, placements), local, *args, **kwargs)
    else:
        with own_numbers((mesh, placements), local.device):
            drawn = func(local, *args, **kwargs)
    return wrap(drawn, mesh, placements, x.shape)


def _drawn_in_graph(func: Any, where: Layout, local: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    like = torch.empty_like(local, **kwargs)
    match func._schema.name:
        case "aten::rand_like":
            return _draw(where, like, "uniform_", 0.0, 1.0)
        case "aten::randn_like":
            return _draw(where, like, "normal_", 0.0, 1.0)
        case "aten::randint_like":
            return _draw(where, like, "random_.from", *(args if len(args) == 2 else (0, *args)))
    if args:
        return _draw(where, like, "bernoulli_.float", *args)
    return (_draw(where, like, "uniform_", 0.0, 1.0) < local).to(like.dtype)


@rule("aten::native_dropout")
def native_dropout(func: Any, x: DTensor, p: float, train: bool | None) -> tuple[DTensor, DTensor]:
    """x with a share p of its elements zeroed, and the mask."""
    local, (mesh, placements) = settled(func, x)
    if is_traced(local) and train is not False:
        mask = _draw((mesh, placements), local, "bernoulli_.float", 1 - p).bool()
        kept = local * mask * (1 / (1 - p) if p < 1 else 0.0)
    else:
        with own_numbers((mesh, placements), local.device):
            kept, mask = func(local, p, train)
    return wrap(kept, mesh, placements, x.shape), wrap(mask, mesh, placements, x.shape)


@rule("aten::native_dropout_backward")
def native_dropout_backward(func: Any, grad: Tensor, mask: DTensor, scale: float) -> DTensor:
    """The gradient where the mask kept an element."""
    mesh, placements = layout(mask)
    return wrap(func(local_as(grad, mesh, placements), mask._local_tensor, scale), mesh, placements, mask.shape)
