"""Tensors without data in an imagined job, of which only this process exists, and the results and kernels of operators.

Torch is asked once for the same shapes: the same operators recur in a step, in equal blocks, under partitions that
divide a layer in the same way, before and after its plans are made. Torch takes up to milliseconds to infer the shape
of a result.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from distconv import settings
from distconv.performance.events import Kernel, KernelCall, Shape
from distconv.rules.convolution.kernels import as_on_a_processor
from distconv.settings.partition import Partition
from distconv.tensors.arguments import each_of
from distconv.tensors.dtensors import wrap
from distconv.tensors.layouts import local_shape
from distconv.tensors.mesh import make_mesh, placements

aten = torch.ops.aten

_known: dict[Any, tuple[Any, Kernel | None]] = {}  # Results, with a `Shape` in the place of each tensor, and kernels.


def made_without_data(func: Any, args: Any, kwargs: Any) -> tuple[Any, Kernel | None]:
    """The result of one of torch's operators, and what the rank computes for it; None for a view, or for nothing."""
    inputs = list(each_of(Tensor, (args, tuple(kwargs.values()))))
    if not _is_new(func) or not all(x.is_meta for x in inputs):
        result = _asked(func, args, kwargs)
        return result, _kernel(func, args, kwargs, inputs, result)
    # An operand that is given twice is read once.
    operands = [_key(x) for x in inputs]
    same = [operands.index(each) for each in operands]
    key = func, *same, _fixed(args), tuple(kwargs), _fixed(tuple(kwargs.values()))
    if key not in _known:
        result = _asked(func, args, kwargs)
        storages = {_storage(x) for x in inputs}
        outputs = each_of(Tensor, (result,))
        kernel = _kernel(func, args, kwargs, inputs, result)
        if any(not y.is_meta or _storage(y) in storages for y in outputs):
            return result, kernel
        _known[key] = tree_map(_shape, result), kernel
        return result, kernel
    shapes, kernel = _known[key]
    return _empty(shapes), kernel


def _fixed(value: Any) -> Any:
    """A value as a key: numbers with their types, as these decide the types of results."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    return tuple(map(_fixed, value)) if isinstance(value, tuple | list) else (type(value), value)


@functools.cache
def _is_new(func: Any) -> bool:
    """Whether an operator changes none of its operands and gives none of them back."""
    schema = func._schema
    return not schema.is_mutable and all(each.alias_info is None for each in (*schema.arguments, *schema.returns))


def _asked(func: Any, args: Any, kwargs: Any) -> Any:
    return _statistics(*args) if func is aten.batch_norm_update_stats.default else func(*args, **kwargs)


def _statistics(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """The shapes of aten.batch_norm_update_stats, which torch does not have for tensors without data."""
    channels = (x.shape[1],)
    return x.new_empty(channels), x.new_empty(channels)


def _kernel(func: Any, args: Any, kwargs: Any, inputs: list[Tensor], result: Any) -> Kernel | None:
    outputs = list(each_of(Tensor, (result,)))
    if func.namespace not in ("aten", "distconv") or not outputs or func in _FREE:
        return None
    if torch.Tag.inplace_view in func.tags:
        return None  # as detach_, of which torch may refuse to be called again
    known = {_storage(x) for x in inputs}
    if not func._schema.is_mutable and all(_storage(y) in known for y in outputs):
        return None  # a view
    moved = {_key(tensor): tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)}
    formula = flop_registry.get(func.overloadpacket)
    flops = int(formula(*args, **kwargs, out_val=result)) if formula else 0
    return Kernel(str(func), flops, sum(moved.values()), _call(func, args, kwargs))


_FREE = (aten.empty.memory_format, aten.new_empty.default, aten.empty_like.default, aten.empty_strided.default)


def _call(func: Any, args: Any, kwargs: Any) -> KernelCall:
    args, kwargs = tree_map(_shape, (tuple(args), dict(kwargs)))
    return KernelCall(func, args, tuple(sorted(kwargs.items())))


def _shape(leaf: Any) -> Any:
    return Shape(tuple(leaf.shape), tuple(leaf.stride()), leaf.dtype) if isinstance(leaf, Tensor) else leaf


def _empty(shapes: Any) -> Any:
    if isinstance(shapes, Shape):
        return torch.empty_strided(shapes.sizes, shapes.strides, dtype=shapes.dtype, device="meta")
    return type(shapes)(map(_empty, shapes)) if isinstance(shapes, tuple | list) else shapes


def _key(tensor: Tensor) -> tuple[int, int, int]:
    return _storage(tensor), int(tensor.storage_offset()), tensor.numel()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@contextlib.contextmanager
def imagined_job(ranks: int, threads: int | None = None, rank: int | None = None) -> Iterator[int]:
    """A job of which only this process exists; returns its rank. Messages go nowhere.

    Args:
        threads: that each rank has on a processor, where its kernels are to be those that it takes there: for some,
            torch decides by threads. None for kernels by their names, of a machine that is not here.
        rank: which one is there. None for a third of their number, rounded down: in numbers to the base of two its
            digits alternate, so that on every axis of four or more ranks it has neighbours on both sides.

    Raises:
        RuntimeError: where the process is in a job already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("an imagined job needs a process that is in no job")
    rank = ranks // 3 if rank is None else rank
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with settings.options({"check": "off"}), as_on_a_processor(threads) if threads else contextlib.nullcontext():
            yield rank
    finally:
        dist.destroy_process_group()


def mesh_of(partition: Partition) -> DeviceMesh:
    """The mesh of a partition in an imagined job, over its first ranks where the job has more."""
    ranks = range(partition.ranks) if partition.ranks < dist.get_world_size() else None
    return make_mesh(partition, ranks=ranks)


def empty_shard(mesh: DeviceMesh, shape: Sequence[int], dtype: torch.dtype) -> DTensor:
    """This rank's part of an activation without data."""
    layout = placements(mesh, len(shape))
    return wrap(torch.empty(local_shape(mesh, layout, shape), device="meta", dtype=dtype), mesh, layout, tuple(shape))
