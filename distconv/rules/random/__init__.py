"""Random operators, dropout masks among them: a rank draws what one process draws, or numbers of its shard's own.

The setting `random` decides. In a compiled graph, operators of distconv draw the numbers that are drawn without one.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distconv.rules.operands.layouts import sharding
from distconv.rules.operands.own_parts import as_own_part, wrapped
from distconv.rules.operands.sums import settled
from distconv.rules.random.whole import (
    MOST_BYTES,
    WholeDraw,
    can_be_drawn,
    fill_part,
    numbers_of,
    own_numbers,
    seed_of_shards,
    shard_coordinates,
)
from distconv.rules.registry import above_autograd, rule
from distconv.rules.schemas import full_name, operator
from distconv.rules.whole import whole_or_refused
from distconv.settings import value
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import Layout, added_up, layout_of, local_box, local_shape, refuse_partial
from distconv.tensors.refusal import UnsupportedOperation, refuse
from distconv.tensors.user_lines import asked_for
from distconv.transfer.redistribution import added
from distconv.transfer.tracing import is_traced
from mucudnn.process import warn


def _fill(part: Tensor, where: Layout, like: Tensor, name: str, *arguments: Any) -> None:
    """Fills a rank's part of a tensor, laid out as said, by the operator in place that is named.

    ``like`` has the shape and the strides of the whole.
    """
    whole = _whole(where, tuple(like.shape), tuple(like.stride()))
    if not _is_whole(whole, part, name, arguments):
        _fill_apart(part, where, name, *arguments)
    elif is_traced(part):
        part.copy_(drawn_whole(part, *whole, name, arguments))
    else:
        fill_part(part, whole, name, arguments)


def _fill_apart(part: Tensor, where: Layout, name: str, *arguments: Any) -> None:
    """The same, with numbers of the shard's own."""
    if is_traced(part):
        part.copy_(drawn_apart(part, seed_of_shards(), shard_coordinates(where), name, arguments))
    else:
        with own_numbers(int(seed_of_shards()), shard_coordinates(where), part.device):
            operator(name)(part, *arguments)


def _is_whole(whole: WholeDraw, part: Tensor, name: str, arguments: tuple[Any, ...]) -> bool:
    """Whether the ranks draw for the whole tensor; the same on all of them."""
    on_gpu = part.device.type == "cuda"
    chosen = value("random") or ("apart" if on_gpu else "same")
    if chosen == "apart":
        return False
    if on_gpu:
        raise refuse(
            name,
            "random=same on a GPU, whose generator gives each element its numbers by the whole tensor's"
            " size; accepted there: random=apart, the default",
        )
    able = can_be_drawn(whole, part.dtype, name, arguments)
    if not able:
        _warn_once(name, asked_for())
    return able


@functools.lru_cache(maxsize=1024)
def _warn_once(name: str, line: str) -> None:
    warn(
        f"{name} {line} draws separate numbers for each shard, as with random=apart: on this processor it cannot draw"
        f" in pieces, and the whole takes more than {MOST_BYTES >> 20} MiB. Results are not those of one process,"
        f" number by number",
        "distconv",
    )


@functools.lru_cache(maxsize=4096)
def _whole(where: Layout, shape: tuple[int, ...], strides: tuple[int, ...]) -> WholeDraw:
    mesh, placements = where
    starts = tuple(start for start, _ in local_box(mesh, placements, shape))
    if torch.empty_strided(shape, strides, device="meta").is_contiguous():
        return WholeDraw(shape, (), starts)
    return WholeDraw(shape, tuple(sorted(range(len(shape)), key=lambda dim: -strides[dim])), starts)


def _given(func: Any, x: DTensor, generator: torch.Generator | None) -> contextlib.AbstractContextManager[None]:
    """A context in which numbers are drawn from the generator that an operator is given."""
    if generator is not None and is_traced(x._local_tensor):
        raise refuse(func, "a generator= of its own in a compiled graph", whole_helps=False)
    return numbers_of(generator)


IN_PLACE = (
    *("bernoulli_.float", "uniform_", "normal_", "exponential_", "random_", "random_.from", "random_.to"),
    *("cauchy_", "log_normal_", "geometric_"),
)


@rule(*(f"aten::{name}" for name in IN_PLACE))
def draw_in_place(func: Any, x: DTensor, *args: Any, generator: torch.Generator | None = None) -> DTensor:
    """Fills x with random numbers."""
    refuse_partial(func, x.placements, "its tensor")
    with _given(func, x, generator):
        _fill(x._local_tensor, layout_of(x), x, full_name(func), *args)
    return x


@rule("aten::rand_like", "aten::randn_like", "aten::randint_like", "aten::randint_like.low_dtype", "aten::bernoulli.p")
def draw(func: Any, x: DTensor, *args: Any, generator: torch.Generator | None = None, **kwargs: Any) -> DTensor:
    """Random numbers laid out as x is."""
    match func._schema.name:
        case "aten::rand_like":
            name, args = "uniform_", (0.0, 1.0)
        case "aten::randn_like":
            name, args = "normal_", (0.0, 1.0)
        case "aten::randint_like":
            name, args = "random_.from", args if len(args) == 2 else (0, *args)
        case _:
            name, kwargs = "bernoulli_.float", {"memory_format": torch.contiguous_format}
    with _given(func, x, generator):
        return _like(func, x, kwargs, name, *args)


def _like(func: Any, x: DTensor, options: dict[str, Any], name: str, *arguments: Any) -> DTensor:
    local, (mesh, placements) = settled(func, x)
    result = torch.empty_like(local, **options)
    whole = torch.empty_like(
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"), **options | {"device": "meta"}
    )
    _fill(result, (mesh, placements), whole, name, *arguments)
    return wrap(result, mesh, placements, x.shape)


@rule("aten::bernoulli")
def bernoulli(func: Any, x: DTensor, *, generator: torch.Generator | None = None) -> DTensor:
    """1 with the probability that x gives, else 0."""
    local, (mesh, placements) = settled(func, x)
    # torch compares each probability with a number of at least 24 bits.
    precise = x.dtype if x.dtype == torch.float64 else torch.float32
    options = {"dtype": precise, "memory_format": torch.contiguous_format}
    with _given(func, x, generator):
        drawn = _like(func, x, options, "uniform_", 0.0, 1.0)._local_tensor
    return wrap((drawn < local).to(local.dtype), mesh, placements, x.shape)


@above_autograd("aten::native_dropout")
def native_dropout(x: DTensor, p: float, train: bool | None) -> tuple[DTensor, DTensor]:
    """x with a share p of its elements zeroed, and the mask."""
    mesh, placements = x.device_mesh, added_up(x.placements)
    local = as_own_part(x, mesh, placements)
    if train is False:
        kept, mask = torch.native_dropout(local, p, train)
    else:
        mask = torch.empty_like(local, dtype=torch.bool)
        _fill(mask, (mesh, placements), x, "bernoulli_.float", 1 - p)
        kept = local * mask * (1 / (1 - p) if p < 1 else 0.0)
    return wrapped(kept, mesh, placements, x.shape), wrapped(mask, mesh, placements, x.shape)


@rule("aten::normal.Tensor_float", "aten::normal.float_Tensor", "aten::normal.Tensor_Tensor")
def normal(func: Any, mean: Any, std: Any = 1.0, *, generator: torch.Generator | None = None) -> Any:
    """Normal numbers of these means and deviations, each a tensor or a number."""
    tensors = [added(x) if isinstance(x, DTensor) else x for x in (mean, std) if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    mesh, placements = sharding(tensors, shape)
    local = torch.empty(local_shape(mesh, placements, shape), dtype=tensors[0].dtype, device=tensors[0].device)
    drawn = wrap(local, mesh, placements, shape)
    with _given(func, drawn, generator):
        _fill(local, (mesh, placements), drawn, "normal_", 0.0, 1.0)
    return drawn.mul_(std).add_(mean)


@rule("aten::multinomial")
def multinomial(
    func: Any, x: DTensor, count: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> Any:
    """Of a large tensor as torch draws where no number depends on others: the classes that come first in a race.

    With replacement, how many numbers are taken from the generator depends on all of them.
    """
    try:
        return whole_or_refused(func, (x, count, replacement), {"generator": generator})
    except UnsupportedOperation:
        if replacement and count > 1:
            raise
    with _given(func, x, generator):
        race = x / _like(func, x, {"memory_format": torch.contiguous_format}, "exponential_", 1.0)
    return race.argmax(-1, keepdim=True) if count == 1 else race.topk(count)[1]


@rule("aten::rrelu_with_noise", "aten::rrelu_with_noise_")
def rrelu(
    func: Any,
    x: DTensor,
    noise: DTensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    *rest: Any,
) -> DTensor:
    """x times a random slope where it is not positive. ``noise`` gets the factors.

    One process draws for such elements only, so that each number depends on all elements before: of a small tensor
    every rank computes the whole, those of a large one are always drawn apart.
    """
    refuse_partial(func, x.placements)
    local, where = x._local_tensor, layout_of(x)
    if not training:
        result = torch.ops.aten.leaky_relu(local, (lower + upper) / 2)
    else:
        with _given(func, x, rest[0] if rest else None):
            result = _sloped(x, noise, lower, upper)
    if func._schema.name.endswith("_"):
        local.copy_(result)
        return x
    return wrap(result, *where, x.shape)


def _sloped(x: DTensor, noise: DTensor, lower: float, upper: float) -> Tensor:
    """This rank's part of it. Fills the noise."""
    local, factors = x._local_tensor, noise._local_tensor
    try:
        functional = torch.ops.aten.rrelu_with_noise_functional.default
        result, drawn = (y._local_tensor for y in whole_or_refused(functional, (x, noise, lower, upper, True), {}))
        factors.copy_(drawn)
    except UnsupportedOperation:
        _fill_apart(factors, layout_of(x), "uniform_", lower, upper)
        factors.masked_fill_(local > 0, 1)
        result = local * factors
    return result


_library = torch.library.Library("distconv", "DEF")
# The number that shards draw by has no value when the graph is made: it is an input.
_library.define("drawn_apart(Tensor like, Tensor seed, int[] shard, str name, Scalar[] arguments) -> Tensor")
_library.define(
    "drawn_whole(Tensor like, int[] shape, int[] order, int[] starts, str name, Scalar[] arguments) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl(_library, "drawn_apart", "CompositeExplicitAutograd")
def _drawn_apart(like: Tensor, seed: Tensor, shard: list[int], name: str, arguments: list[Any]) -> Tensor:
    result = torch.empty_like(like)
    with own_numbers(int(seed), shard, like.device):
        operator(name)(result, *arguments)
    return result


@torch.library.impl(_library, "drawn_whole", "CompositeExplicitAutograd")
def _drawn_whole(
    like: Tensor, shape: list[int], order: list[int], starts: list[int], name: str, arguments: list[Any]
) -> Tensor:
    result = torch.empty_like(like)
    fill_part(result, WholeDraw(tuple(shape), tuple(order), tuple(starts)), name, arguments)
    return result


for _name in ("drawn_apart", "drawn_whole"):
    torch.library.register_fake(f"distconv::{_name}", lambda like, *_: torch.empty_like(like), lib=_library)

drawn_apart: Any = torch.ops.distconv.drawn_apart
drawn_whole: Any = torch.ops.distconv.drawn_whole
