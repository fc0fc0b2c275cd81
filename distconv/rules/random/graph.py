"""Random draws in a compiled graph: operators of distconv, which draw when the graph runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from distconv.rules.random.own import own_numbers
from distconv.rules.random.whole import WholeDraw, fill_part
from distconv.rules.schemas import operator

_library = torch.library.Library("distconv", "DEF")
# The number that shards draw by has no value when the graph is made: it is an input.
_library.define("drawn_apart(Tensor seed, int[] shard, Tensor like, str name, Scalar[] arguments) -> Tensor")
_library.define(
    "drawn_whole(Tensor like, int[] shape, int[] order, int[] starts, str name, Scalar[] arguments) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)


@torch.library.impl(_library, "drawn_apart", "CompositeExplicitAutograd")
def _drawn_apart(seed: Tensor, shard: list[int], like: Tensor, name: str, arguments: list[Any]) -> Tensor:
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


@torch.library.register_fake("distconv::drawn_apart", lib=_library)  # type: ignore[untyped-decorator]
def _apart_without_values(seed: Tensor, shard: Any, like: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(like)


@torch.library.register_fake("distconv::drawn_whole", lib=_library)  # type: ignore[untyped-decorator]
def _whole_without_values(like: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(like)


drawn_apart: Any = torch.ops.distconv.drawn_apart
drawn_whole: Any = torch.ops.distconv.drawn_whole
