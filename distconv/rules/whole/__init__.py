"""Operators that run on whole tensors, where they cannot be computed in parts.

Within a model's call only small tensors are gathered for them: a matrix to invert, a table of relative positions or the
scores of some classes cost next to nothing. An activation is not small, and for it the operator is refused. Shapes
alone decide what is small, so that all ranks decide the same.

Outside, a script may ask anything of its results, as in one process: tensors of any size are gathered there, if they
fit into memory, and counted (see `distconv.tensors.gathering.record`).

In-place changes of a plain tensor by a distributed one, such as a moving average of sharded parameters, are here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils._pytree import tree_leaves, tree_map

from distconv.rules.registry import rule
from distconv.rules.schemas import changed_tensors, is_view, operator
from distconv.rules.whole.copies import copy_of
from distconv.tensors import hooks
from distconv.tensors.dtensors import wrap
from distconv.tensors.gathering.record import admit, in_model_call
from distconv.tensors.layouts import find_layout, has_partial, replicated, undoes_shard
from distconv.tensors.mesh import sharded_dims
from distconv.tensors.refusal import UnsupportedOperation, refuse
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import redistributed_data, unsharded

MOST_BYTES = 1 << 20
"""The most that all sharded tensors of one operator may take together to be gathered within a model's call."""


def permit(func: Any, values: Any, why: str | UnsupportedOperation) -> None:
    """The sharded tensors among some values are about to be gathered for an operator.

    UnsupportedOperation where that is not permitted: the one given, or one that says why they would have to be.
    """
    sharded = [t for t in tree_leaves(values) if isinstance(t, DTensor) and undone(t)]
    size = sum(t.numel() * t.element_size() for t in sharded)
    if size > MOST_BYTES:
        if in_model_call():
            if isinstance(why, UnsupportedOperation):
                raise why
            raise refuse(func, f"of a tensor {tuple(sharded[0].shape)} laid out as {sharded[0].placements} {why}")
        admit(func, size, sharded[0].device_mesh)


def whole_value(what: str, x: Any) -> Tensor:
    """The whole of a tensor as a plain one, for what leaves torch, without autograd. Collective; see `permit`."""
    permit(what, [x], "it needs the whole tensor; use distconv.gather first where that is meant")
    local = unsharded(x)
    for notify in hooks.after_whole_reads:
        notify(x.device_mesh)
    return local


def undone(x: DTensor) -> bool:
    """Whether a tensor has shards, which a gather would undo."""
    return undoes_shard(x.device_mesh, x.placements, replicated(x.device_mesh))


NO_RULE = "it has no rule for shards; use distconv.gather first where that is meant"


def whole_or_refused(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], why: str | UnsupportedOperation = NO_RULE
) -> Any:
    """The result of an operator on whole tensors if these may be gathered; else it is refused."""
    permit(func, (args, kwargs), why)
    return _computed_whole(func, args, kwargs)


hooks.whole_operators.append(whole_or_refused)


def _computed_whole(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """What an operator gives for whole tensors, every rank computing all of it; laid out as its first sharded tensor
    where the shapes are equal, else whole on every rank."""
    mesh, _ = find_layout(*tree_leaves((args, kwargs)))

    def whole(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value
        local = redistributed_data(value, mesh, replicated(mesh))._local_tensor
        return local.clone() if local is value._local_tensor else local

    written = changed_tensors(func, args, kwargs)
    whole_args, whole_kwargs = tree_map(whole, (list(args), dict(kwargs)))
    result = func(*whole_args, **whole_kwargs)
    if written:
        for tensor, new in zip(written, changed_tensors(func, whole_args, whole_kwargs), strict=True):
            if isinstance(tensor, DTensor):
                tensor._local_tensor.copy_(local_as(new, mesh, tensor.placements))
        return result if result is None else written[0] if len(written) == 1 else tuple(written)
    first = next(t for t in tree_leaves((args, kwargs)) if isinstance(t, DTensor))

    def write(x: DTensor, view: DTensor) -> None:
        own = whole(x)
        func(own, *args[1:], **kwargs).copy_(whole(view))
        x._local_tensor.copy_(local_as(own, mesh, x.placements))

    def shard(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return value
        is_alike = value.shape == first.shape and not has_partial(first.placements)
        placements = first.placements if is_alike else replicated(mesh)
        y = wrap(local_as(value, mesh, placements).clone(), mesh, placements, value.shape)
        if not is_view(func):
            return y
        return copy_of(y, first, write if isinstance(result, Tensor) else None)

    return tree_map(shard, result)


REFUSED = (
    *("nonzero", "masked_select", "bincount", "bincount.weights", "median", "nanmedian", "histc", "histogram.bin_ct"),
    *("_unique2", "unique_consecutive", "unique_dim"),
)


def _refused(func: Any, *args: Any, **kwargs: Any) -> Any:
    return whole_or_refused(func, args, kwargs)


rule(*(f"aten::{name}" for name in REFUSED if operator(name) is not None))(_refused)


@rule(
    *("aten::_to_sparse", "aten::_to_sparse.sparse_dim", "aten::_to_sparse_csr", "aten::_to_sparse_csc"),
    *("aten::_to_sparse_bsr", "aten::_to_sparse_bsc"),
)
def sparse(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    """Refused: the number of a rank's elements of a sparse tensor depends on their values."""
    raise refuse(func, "a sparse tensor of a sharded one; accepted: dense tensors, or distconv.gather first")


_PASS_ON = (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor, torch.ops.aten.sub_.Tensor)
"""Operators whose gradient is that of the plain tensor, times a number."""


def whole_beside(func: Any, x: Any) -> Any:
    """A DTensor as the plain tensor that changes another in place; anything else as it is.

    Its shards are gathered, so that every rank's plain tensor becomes what it would be in one process. Collective.
    Where a gradient is wanted it may be copied or added, within the bounds of `permit`: every rank has the whole
    gradient of the plain tensor, and cuts from it that of its shard. Of what is multiplied, there is no way back.
    """
    if not isinstance(x, DTensor):
        return x
    mesh = x.device_mesh
    if all(placement.is_replicate() for placement in x.placements):
        return x._local_tensor
    if (
        torch.is_grad_enabled()
        and x.requires_grad
        and any(mesh.size(axis) > 1 for axis, _ in sharded_dims(mesh, x.placements))
    ):
        if func in _PASS_ON:
            permit(func, [x], "which is written to a plain tensor, and needs a gradient")
            x.register_hook(functools.partial(_cut, x.device_mesh, x.placements))
            return unsharded(x)
        raise refuse(
            func,
            f"in place on a plain tensor, with a tensor {tuple(x.shape)} laid out as {x.placements}: use"
            f" distconv.gather on that first, or .detach() where no gradient is wanted",
            whole_helps=False,
        )
    return unsharded(x)


def _cut(mesh: DeviceMesh, placements: Sequence[Placement], grad: Tensor) -> Tensor:
    """A whole gradient, the same on every rank, as that of shards."""
    if isinstance(grad, DTensor):
        return grad
    return wrap(local_as(grad, mesh, placements), mesh, placements, grad.shape)
