"""Rules: what an operator does when its tensors are DTensors with sharded samples or space.

A rule per file, each with the same sequence: a plan (pure, cached by shapes), the rule, its adjoint. To write one:

1. ``@rule("aten::name", "aten::other.overload")`` registers ``handler(func, *args, **kwargs)`` for the operator, below
   autograd, for every DTensor; register the operator's backward likewise. It must return what the operator returns, as
   DTensors.
2. ``layout(x)`` gives (mesh, placements); x.shape is global, ``x._local_tensor`` the shard. ``shard_axes(x)`` maps
   tensor dim to mesh axis.
3. Decide everything from global shapes, so that every rank decides alike; raise ``refuse(func, why)`` before any
   communication. Where the rule does not concern these arguments, ``return stock(func, args, kwargs)``: DTensor's own
   behaviour (guarded).
4. Per sharded dim: ``owned = ownership(extent, ranks)``; from the interval of outputs each rank owns derive a ``Need``
   of inputs (``exchange.window``, or any pieces); ``which = exchange(mesh, axis, dim, owned, needs)``;
   ``which.fetch(local, fill)``. Do one dim after the other: corners come by themselves. ``which.adjoint(grad)``, in the
   reverse order, is the backward.
5. Run the ordinary ``torch.ops.aten`` operator on plain local tensors; an empty shard skips the call, never the fetch.
6. ``wrap(local, mesh, placements, shape)`` makes the result without communication; sums over shards are ``Partial()``.
7. Other tensor arguments: ``local_as(t, mesh, placements)`` (plain tensors count as replicated; slicing is free,
   gathering refused).
8. Keep plans in a ``functools.lru_cache`` keyed by (mesh, placements, shapes, arguments): the fixed cost per call
   matters most.
9. Import the file in ``distconv/__init__.py``.
10. Test it against stock torch in float64: output, input gradient, parameter gradients, uneven and empty shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from distconv.partition import is_ours, nested_ownership, ownership, sharded_dims

Layout = tuple[DeviceMesh, tuple[Placement, ...]]


batch_norm_statistics: dict[DeviceMesh, str] = {}
"""Per mesh in use: batch norm's statistics are over the "global" batch, or over each rank's "local" share."""


class UnsupportedOperation(NotImplementedError):
    """An operator that cannot run on its shards; raised alike on every rank before any communication."""


H = TypeVar("H", bound=Callable[..., Any])

checks: list[Callable[[Any, Sequence[Any], dict[str, Any]], None]] = []
"""Each is called with (operator, args, kwargs) before a rule and raises where the operator is refused."""

registered: set[str] = set()
"""The operators that have a rule."""


def rule(*operators: str) -> Callable[[H], H]:
    """Register ``handler(func, *args, **kwargs)`` for the named operators on DTensors of our meshes."""

    def register(handler: H) -> H:
        def dispatch(cls: type, func: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
            if not _on_our_mesh(args):
                return leave(func, args, kwargs or {})
            for check in checks:
                check(func, args, kwargs or {})
            return handler(func, *args, **(kwargs or {}))

        for operator in operators:
            torch.library.register_torch_dispatch(operator, DTensor, dispatch)
            registered.add(operator)
        return handler

    return register


def _on_our_mesh(args: Sequence[Any]) -> bool:
    """Whether the first DTensor, found in lists too, lies on one of our meshes; a program may use others for itself."""
    for arg in args:
        if isinstance(arg, DTensor):
            return is_ours(arg.device_mesh)
        if isinstance(arg, list | tuple) and any(isinstance(item, DTensor) for item in arg):
            return _on_our_mesh(arg)
    return True


def leave(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What DTensor does with an operator where distconv has nothing to say."""
    special = DTensor._op_dispatcher._custom_op_handlers.get(func)
    if special is not None:
        return special(func, tuple(args), kwargs)
    parts = func.decompose(*args, **kwargs)
    if parts is not NotImplemented:
        return parts
    result = stock(func, args, kwargs)
    if func._schema.name.endswith("_"):
        return args[0]
    outputs = [kwargs[argument.name] for argument in func._schema.arguments if argument.is_out]
    for output, computed in zip(outputs, result if isinstance(result, tuple) else (result,), strict=False):
        output._spec = computed._spec
    return result if not outputs else outputs[0] if len(outputs) == 1 else tuple(outputs)


def refuse(func: Any, why: str) -> UnsupportedOperation:
    """The error to raise for an operator that cannot run on these shards."""
    return UnsupportedOperation(f"{func}: {why}")


def layout(x: DTensor) -> Layout:
    """(mesh, placements) of a DTensor."""
    return x.device_mesh, x.placements


def find_layout(*tensors: Any) -> Layout:
    """The layout of the first DTensor among the arguments."""
    return next(layout(tensor) for tensor in tensors if isinstance(tensor, DTensor))


channel_algorithms: dict[DeviceMesh | None, str] = {None: "auto"}
"""Per mesh, and for all others: which of distconv.channels.ALGORITHMS shards the weights of its layers."""


def channel_algorithm(mesh: DeviceMesh) -> str:
    """The algorithm of a mesh."""
    return channel_algorithms.get(mesh, channel_algorithms[None])


def shard_axes(mesh: DeviceMesh, placements: Sequence[Placement], first: int = 0) -> dict[int, int]:
    """{tensor dim: mesh axis} of the shards of the dims from ``first`` on.

    ``UnsupportedOperation`` where two axes shard one of them.
    """
    axes: dict[int, int] = {}
    for axis, placement in enumerate(placements):
        if isinstance(placement, Shard):
            if placement.dim < first:
                continue
            if placement.dim in axes:
                raise UnsupportedOperation(f"dim {placement.dim} is sharded by two mesh axes: {tuple(placements)}")
            axes[placement.dim] = axis
        elif placement.is_shard():
            raise UnsupportedOperation(f"placement {placement} is no plain shard")
    return axes


def dim_axes(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> tuple[int, ...]:
    """The mesh axes of more than one rank that shard a dim, each within the shards of those before."""
    return tuple(axis for axis, of in sharded_dims(mesh, placements) if of == dim and mesh.size(axis) > 1)


def owners(mesh: DeviceMesh, axes: Sequence[int], extent: int) -> tuple[tuple[int, int], ...]:
    """The interval of a dim that each rank along the axes that shard it owns; the last axis runs fastest."""
    return nested_ownership(extent, [mesh.size(axis) for axis in axes])


def coordinate(mesh: DeviceMesh, axes: Sequence[int]) -> int:
    """This rank's place in what ``owners`` gives."""
    return functools.reduce(lambda at, axis: at * mesh.size(axis) + mesh.get_local_rank(axis), axes, 0)


def local_shape(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> tuple[int, ...]:
    """Shape of this rank's shard of a tensor of global ``shape``."""
    return tuple(stop - start for start, stop in local_box(mesh, placements, shape))


def local_box(mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The interval of every dim that this rank owns. Where several axes shard one dim, a later one divides a shard."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return box_at(mesh, placements, shape, coordinate)


def box_at(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], coordinate: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    """The same for the rank at a coordinate of the mesh."""
    box = [(0, extent) for extent in shape]
    for axis, dim in sharded_dims(mesh, placements):
        first, last = box[dim]
        start, stop = ownership(last - first, mesh.size(axis))[coordinate[axis]]
        box[dim] = (first + start, first + stop)
    return tuple(box)


def wrap(local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The DTensor of global ``shape`` whose shard on this rank is ``local``; no communication, no autograd.

    A shard with gaps is copied; channels_last and whole tensors stay as they are.
    """
    strides = [1] * len(shape)
    order = range(len(shape) - 1, -1, -1)
    if not local.is_contiguous():
        if local.shape == tuple(shape) and all(placement.is_replicate() for placement in placements):
            return _dtensor(local, _spec(mesh, tuple(placements), tuple(shape), local.stride(), local.dtype))
        if local.dim() in (4, 5) and local.stride(1) == 1 and local.shape[1] > 1:
            order = (1, *range(len(shape) - 1, 1, -1), 0)  # type: ignore[assignment]
            local = local.contiguous(memory_format=torch.channels_last if local.dim() == 4 else torch.channels_last_3d)
        else:
            local = local.contiguous()
    step = 1
    for dim in order:
        strides[dim] = step
        step *= max(shape[dim], 1)
    return _dtensor(local, _spec(mesh, tuple(placements), tuple(shape), tuple(strides), local.dtype))


def _dtensor(local: Tensor, spec: DTensorSpec) -> DTensor:
    # Not DTensor(...): its __init__ does nothing, and takes three times as long as all the rest.
    return DTensor.__new__(DTensor, local, spec, requires_grad=False)


@functools.lru_cache(maxsize=4096)
def _spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), strides, dtype))


def local_as(tensor: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """This rank's part of ``tensor`` under ``placements``.

    A plain tensor counts as replicated. Replicated to sharded is a local slice; a partial sum is reduced. To undo or
    change a shard is refused.
    """
    if not isinstance(tensor, DTensor):
        local, current = tensor, replicated(mesh)
    else:
        local, current = tensor._local_tensor, tensor.placements
        if tensor.device_mesh is not mesh and tensor.device_mesh != mesh:
            current = _elsewhere(tensor, mesh)
    if tuple(current) == tuple(placements):
        return local
    if undoes_shard(mesh, current, placements):
        raise UnsupportedOperation(f"a tensor laid out as {tuple(current)} is needed as {tuple(placements)}")
    if any(isinstance(placement, Partial) for placement in current):
        assert isinstance(tensor, DTensor)
        return tensor.redistribute(mesh, tuple(placements)).to_local()
    if any(not isinstance(current[axis], Shard) for axis, _ in sharded_dims(mesh, placements)):
        _refuse_nesting_in_a_shard(current, placements)
    for axis, dim in sharded_dims(mesh, placements):
        if not isinstance(current[axis], Shard):
            start, stop = ownership(local.shape[dim], mesh.size(axis))[mesh.get_local_rank(axis)]
            local = local.narrow(dim, start, stop - start)
    return local


def _elsewhere(tensor: DTensor, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The layout of a tensor from another mesh: replicated on the same ranks, as the norm of a gradient is."""
    same = sorted(tensor.device_mesh.mesh.flatten().tolist()) == sorted(mesh.mesh.flatten().tolist())
    if not same or not all(placement.is_replicate() for placement in tensor.placements):
        raise UnsupportedOperation(
            f"tensors on two meshes: {tensor.device_mesh} and {mesh}; distconv.redistribute brings one to the other"
        )
    return replicated(mesh)


def _refuse_nesting_in_a_shard(current: Sequence[Placement], target: Sequence[Placement]) -> None:
    for axis, (before, after) in enumerate(zip(current, target, strict=True)):
        if before != after and any(after == other and other.is_shard() for other in current[axis + 1 :]):
            raise UnsupportedOperation(f"a tensor laid out as {tuple(current)} is needed as {tuple(target)}")


def replicated(mesh: DeviceMesh) -> tuple[Placement, ...]:
    """The layout of a tensor that every rank holds whole."""
    return (Replicate(),) * mesh.ndim


def undoes_shard(mesh: DeviceMesh, current: Sequence[Placement], target: Sequence[Placement]) -> bool:
    """Whether going from one layout to the other would gather or reshuffle shards, or make partial sums."""
    return any(
        mesh.size(axis) > 1 and before != after and (before.is_shard() or after.is_partial())
        for axis, (before, after) in enumerate(zip(current, target, strict=True))
    )


def stock(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """DTensor's own behaviour of an operator that has a rule here; what would gather a shard is refused."""
    dispatcher = DTensor._op_dispatcher
    info = dispatcher.unwrap_to_op_info(func, tuple(args), kwargs or {})
    dispatcher.sharding_propagator.propagate(info)
    assert info.output_sharding is not None
    spec: Any = info.output_sharding.output_spec
    if func._schema.name.endswith("_") and isinstance(spec, DTensorSpec) and spec.placements != args[0].placements:
        raise refuse(func, f"in place on {args[0].placements}, what it computes would be laid out as {spec.placements}")
    results = dispatcher._dispatch_get_local_results_slow_path(func, tuple(args), info)
    return dispatcher.wrap(results, spec)


def install_guard() -> None:
    """Make every silent gather of a shard on one of our meshes an ``UnsupportedOperation``, before it communicates."""
    dispatcher = DTensor._op_dispatcher
    redistribute = dispatcher.redistribute_local_args
    if getattr(redistribute, "refuses_gathers", False):
        return

    def guarded(op_info: Any, suggested: Any, *rest: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(suggested.args_schema)
        for before, after in zip(op_info.flat_args_schema, leaves, strict=False):
            if not (isinstance(before, DTensorSpec) and isinstance(after, DTensorSpec) and is_ours(before.mesh)):
                continue
            # A replicated tensor becomes a partial sum without communication, so that sums can be added late.
            pairs = zip(before.placements, after.placements, strict=True)
            target = [b if b.is_replicate() and a.is_partial("sum") else a for b, a in pairs]
            if undoes_shard(before.mesh, before.placements, target):
                raise UnsupportedOperation(
                    f"{suggested.op}: no rule runs it on a tensor {tuple(before.shape)} laid out as"
                    f" {before.placements}; DTensor would gather it to {after.placements}."
                    f" Use distconv.gather first where that is meant"
                )
        redistribute(op_info, suggested, *rest)

    guarded.refuses_gathers = True  # type: ignore[attr-defined]
    dispatcher.redistribute_local_args = guarded  # type: ignore[assignment,method-assign]
