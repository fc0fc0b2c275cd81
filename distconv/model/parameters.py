"""Parameters in shards: a rank keeps its part of a weight, and so of its gradient and of what the optimizer keeps.

A module's parameter is replaced by a DTensor of the same whole value, cut along the axes that shard channels as
distconv.channels says; one that no axis shards stays the plain tensor it was. What still refers to the old parameter is
told so at its next use: it must not go on with a tensor that nobody trains.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_map

from distconv.dtensors import wrap
from distconv.layouts import replicated
from distconv.mesh import is_ours
from distconv.mesh_options import channel_algorithm
from distconv.model.assignment import Assignment
from distconv.model.layers import parameter_placements
from distconv.model.optimizer_steps import step_on_local_tensors
from distconv.partition import Partition
from distconv.refusal import UnsupportedOperation
from distconv.transfer.local_part import local_as
from distconv.transfer.redistribution import moved


class Replaced(nn.Parameter):
    """A parameter whose value has moved to shards."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(
            "this parameter has been sharded over the ranks, and its module has another in its place: call"
            " model.parameters() again, and make an optimizer after distconv.model.parallelize"
        )


def sharded(tensor: Tensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> DTensor:
    """A DTensor of the whole value of a tensor, whose memory it does not share. No autograd.

    A plain tensor is taken to be equal on all ranks, and is cut without communication.
    """
    if isinstance(tensor, DTensor):
        return moved(tensor, mesh, layout)
    return wrap(local_as(tensor.detach(), mesh, layout).clone(), mesh, layout, tensor.shape)


@torch.inference_mode(False)  # a script's first call may be an evaluation; what it makes of parameters is trained later
def shard_parameters(places: Mapping[nn.Module, Assignment], optimizers: Iterable[Optimizer] = ()) -> None:
    """Shard the modules' own parameters on their meshes, and follow in the optimizers.

    A parameter that modules on different meshes share stays whole; of one that modules on the same mesh share, the
    first module's channel algorithm decides.
    """
    homes: dict[Tensor, tuple[DeviceMesh, tuple[Placement, ...]]] = {}
    uses: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    for module, place in places.items():
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        mesh, algorithm = place.mesh, place.algorithm or channel_algorithm(place.mesh)
        layouts = parameter_placements(module, algorithm, partition_of(mesh)) if own else {}
        for name, parameter in own.items():
            first, layout = homes.setdefault(parameter, (mesh, layouts[name]))
            if first != mesh:
                homes[parameter] = first, replicated(first)
            uses.setdefault(parameter, []).append((module, name))
    replaced: dict[Tensor, nn.Parameter] = {}
    for old, (mesh, layout) in homes.items():
        if isinstance(old, DTensor):
            if is_ours(old.device_mesh):
                _move(old, mesh, layout)
        elif any(isinstance(placement, Shard) and mesh.size(axis) > 1 for axis, placement in enumerate(layout)):
            replaced[old] = _shard(old, mesh, layout)
    for optimizer in optimizers:
        _refuse_flat(optimizer, replaced)
    for old, new in replaced.items():
        for module, name in uses[old]:
            module._parameters[name] = new
    for optimizer in optimizers:
        _follow(optimizer, replaced)
    for old in replaced:
        old.grad = None
        old.data = torch.empty(0, dtype=old.dtype, device=old.device)
        old.__class__ = Replaced
    if replaced:
        _watch_steps()


def _shard(parameter: Tensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> nn.Parameter:
    new = nn.Parameter(sharded(parameter, mesh, layout), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        new.grad = sharded(parameter.grad, mesh, layout)
    new.__dict__.update(parameter.__dict__)  # what a script has written on it, to group parameters by, say
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if getattr(parameter, hooks) is not None:
            setattr(new, hooks, getattr(parameter, hooks))
    return new


def _move(parameter: DTensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> None:
    """To another partition; the parameter stays the same object, which optimizers hold."""
    grad = parameter.grad
    parameter.grad = None
    for tensor in (parameter, grad):
        if isinstance(tensor, DTensor):
            new = moved(tensor.detach(), mesh, layout)  # type: ignore[arg-type]
            tensor._local_tensor, tensor._spec = new._local_tensor, new._spec
    parameter.grad = grad


def partition_of(mesh: DeviceMesh) -> Partition:
    """The partition that a mesh was made for."""
    return Partition(tuple(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True)))


def _refuse_flat(optimizer: Optimizer, sharded: Iterable[Tensor]) -> None:
    """UnsupportedOperation where an optimizer that keeps all parameters in one flat vector has some in shards."""
    sharded = set(sharded)
    held = (parameter for group in optimizer.param_groups for parameter in group["params"])
    if isinstance(optimizer, torch.optim.LBFGS) and any(parameter in sharded for parameter in held):
        raise UnsupportedOperation(
            "torch.optim.LBFGS keeps all parameters in one flat vector, but here they are sharded; accepted: another"
            " optimizer, or a partition without the axes channel and filter"
        )


def _follow(optimizer: Optimizer, replaced: Mapping[Tensor, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["params"][:] = [replaced.get(parameter, parameter) for parameter in group["params"]]
    for parameter in [parameter for parameter in optimizer.state if parameter in replaced]:
        optimizer.state[replaced[parameter]] = optimizer.state.pop(parameter)


_watching: list[Any] = []


def _watch_steps() -> None:
    step_on_local_tensors()
    if not _watching:
        _watching.append(register_optimizer_step_pre_hook(_shard_state))


def _shard_state(optimizer: Optimizer, *_: Any) -> None:
    """What was loaded, or kept since before a parameter was sharded, is whole: from now on it is sharded as that is."""
    _refuse_flat(optimizer, (p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)))
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, DTensor) or not is_ours(parameter.device_mesh):
            continue
        home = parameter.device_mesh, parameter.placements

        def like(value: Any, shape: torch.Size = parameter.shape, home: Any = home) -> Any:
            if not isinstance(value, Tensor) or value.shape != shape or not shape:
                return value
            if isinstance(value, DTensor) and (value.device_mesh, value.placements) == home:
                return value
            return sharded(value, *home)

        for key, value in state.items():
            state[key] = tree_map(like, value) if isinstance(value, list | tuple | dict | Tensor) else value


_known: weakref.WeakSet[Optimizer] = weakref.WeakSet()


@contextlib.contextmanager
def optimizers_known() -> Iterator[None]:
    """Within it, optimizers that are made are known, so that they can follow parameters that are replaced later."""
    begin = Optimizer.__init__

    def init(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        begin(optimizer, *args, **kwargs)
        _known.add(optimizer)

    Optimizer.__init__ = init  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Optimizer.__init__ = begin  # type: ignore[method-assign]
        _known.clear()


def known_optimizers() -> list[Optimizer]:
    """Those made within ``optimizers_known``."""
    return list(_known)
