"""Sharded parameters: a rank has only its part of a weight, of its gradient and of the optimizer's state.

A module's parameter is replaced by a DTensor of the same whole value, cut along the axes that shard channels as
`distconv.settings.channels` says. A parameter that no axis shards stays a plain tensor, and so does one that shares
memory with another parameter, a buffer or an attribute of a module. A script's lists and optimizers may still contain
the old parameter: everything that is done with it is passed on to the new one (`Replaced`).
"""

from __future__ import annotations

import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves, tree_map

from distconv.model.earlier_graphs import pass_gradients
from distconv.model.fully_sharded import full_shards
from distconv.model.model_modules import Assignment
from distconv.model.optimizer_steps import optimizers, step_on_local_tensors
from distconv.model.parameter_hooks import HOOKS
from distconv.model.replacement import (
    Replaced,
    called_modules,
    current,
    memory_of,
    state_of_called_modules,
    successors,
    try_swap,
)
from distconv.model.shard_gather import sharded
from distconv.private_names import FULLY_SHARDED, RESHAPED, require
from distconv.settings.channels import ChannelMap, weight_dims
from distconv.settings.partition import Partition, shards_channels
from distconv.tensors.layouts import replicated
from distconv.tensors.mesh import axis_names, channel_algorithm, is_ours
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import until_put_back, when_put_back
from distconv.tensors.untraced import untraced
from distconv.transfer.redistribution import redistributed_data

LEFT = "_distconv_left"
"""An attribute of a sharded parameter's local tensor: a tensor of the memory before sharding, if it is still used."""

_left: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
"""These tensors of all parameters, by storage."""


def has_substitutes(module: nn.Module) -> bool:
    """Whether ``functional_call`` has put other tensors in place of a model's parameters."""
    return not all(isinstance(x, nn.Parameter) for x in module.parameters())


@torch.inference_mode(False)  # a script's first call may be an evaluation, but the parameters are trained later
def shard_parameters(places: Mapping[nn.Module, Assignment], fully: bool = False) -> None:
    """Shards the parameters of modules on their meshes; references to the old ones go on working.

    ``fully``: along all axes, and not only those of channels (`distconv.model.fully_sharded`).

    A parameter that modules on different meshes share stays whole. If modules on one mesh share it, the channel
    algorithm of the first decides. Tensors that ``functional_call`` has put in place of parameters stay as they are.
    """
    if fully:
        require(FULLY_SHARDED)
    homes: dict[Tensor, tuple[DeviceMesh, tuple[Placement, ...]]] = {}
    uses: dict[Tensor, list[tuple[nn.Module, str]]] = {}
    apart: set[Tensor] = set()
    """Parameters of modules on several meshes, or with sparse gradients, which are not fully sharded."""
    for module, place in places.items():
        own = {name: current(x) for name, x in module._parameters.items() if isinstance(x, nn.Parameter) and x.is_leaf}
        mesh, algorithm = place.mesh, place.algorithm or channel_algorithm(place.mesh)
        layouts = parameter_placements(module, algorithm, partition_of(mesh)) if own else {}
        for name, parameter in own.items():
            first, layout = homes.setdefault(parameter, (mesh, layouts[name]))
            if first != mesh:
                homes[parameter] = first, replicated(first)
                apart.add(parameter)
            elif getattr(module, "sparse", False):
                apart.add(parameter)
            uses.setdefault(parameter, []).append((module, name))
    if fully:
        for each, (mesh, layout) in homes.items():
            if each not in apart:
                homes[each] = mesh, full_shards(mesh, layout, each)
    times = Counter(memory_of(x) for x in {id(x): x for x in _in_memory(places, homes)}.values())
    for old, (mesh, layout) in homes.items():
        if memory_of(old) in _left or (_is_elsewhere(old, mesh, layout) and times[memory_of(old)] > 1):
            module, name = uses[old][0]
            raise UnsupportedOperation(
                f"parameter {name} of {type(module).__name__}, shape {tuple(old.shape)}: shares its memory with a"
                " tensor that is in another layout; accepted: one parameter in both places, or a .clone()"
            )
    replaced: dict[Tensor, nn.Parameter] = {}
    for old, (mesh, layout) in homes.items():
        if isinstance(old, DTensor):
            if _is_elsewhere(old, mesh, layout):  # otherwise left alone: an earlier graph may have saved it
                _move(old, mesh, layout)
        elif (
            times[memory_of(old)] == 1
            and any(isinstance(placement, Shard) and mesh.size(axis) > 1 for axis, placement in enumerate(layout))
            and not _has_gradient_of_others(old)
        ):
            replaced[old] = _shard(old, mesh, layout)
    for old, new in replaced.items():
        for module, name in uses[old]:
            module._parameters[name] = new
        _replace(old, new)
    called_modules.update(places)
    if replaced:
        _watch_steps()
        for optimizer in optimizers():
            step_on_current(optimizer)
            _state_of_current(optimizer)


def _in_memory(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """All tensors that may share memory: these parameters, the modules' other tensors, and states of called models."""
    yield from parameters
    yield from state_of_called_modules()
    for module in modules:
        rest = [x for name, x in vars(module).items() if name != "_parameters"]
        yield from (x for x in tree_leaves(rest) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter))


def _has_gradient_of_others(parameter: Tensor) -> bool:
    """Whether a tensor of the script has memory of its gradient, such as one buffer of all gradients."""
    grad = parameter.grad
    if grad is None or grad.layout is not torch.strided:
        return False
    memory = grad.untyped_storage()
    return torch._C._storage_Use_Count(memory._cdata) > 2  # the gradient's and that of `memory`


def _shard(parameter: Tensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> nn.Parameter:
    require(RESHAPED)
    new = nn.Parameter(sharded(parameter, mesh, layout), requires_grad=parameter.requires_grad)
    if parameter.grad is not None:
        new.grad = sharded(parameter.grad, mesh, layout)
    new.__dict__.update(parameter.__dict__)  # attributes that a script has set, for example to group parameters
    for hooks in HOOKS:
        if getattr(parameter, hooks) is not None:
            setattr(new, hooks, getattr(parameter, hooks))
    return new


def _replace(old: Tensor, new: nn.Parameter) -> None:
    """Makes ``old`` a `Replaced` parameter for ``new``, to which earlier graphs pass their gradients, and releases its
    memory where no such graph has saved it."""
    old.grad = None
    memory = old.untyped_storage()
    late = nn.Parameter(torch.empty(0, dtype=old.dtype, device=old.device))
    pass_gradients(late if try_swap(old, late) else old, new)  # type: ignore[arg-type]
    del late
    if torch._C._storage_Use_Count(memory._cdata) > 1:  # there is a view of it, or a NumPy array
        left = torch.empty(0, dtype=new.dtype, device=memory.device).set_(memory)
        _left[memory._cdata] = left
        setattr(new._local_tensor, LEFT, left)  # type: ignore[attr-defined]
    old.__dict__ = new.__dict__
    old.__class__ = Replaced
    successors[old] = new
    hooks: Any = getattr(new, "_post_accumulate_grad_hooks", None) or {}
    for key, hook in hooks.items():  # they were registered on the old parameter, and expect it as argument
        hooks[key] = functools.partial(_called_with_old, hook, old)


def _called_with_old(hook: Callable[[Tensor], None], old: Tensor, _: Tensor) -> None:
    hook(old)


def _is_elsewhere(x: Tensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> bool:
    return isinstance(x, DTensor) and is_ours(x.device_mesh) and (x.device_mesh, x.placements) != (mesh, tuple(layout))


def _move(parameter: DTensor, mesh: DeviceMesh, layout: tuple[Placement, ...]) -> None:
    """Redistributes a parameter and its gradient. It stays the same object, as optimizers refer to it."""
    grad = parameter.grad
    parameter.grad = None
    for tensor in (parameter, grad):
        if isinstance(tensor, DTensor):
            new = redistributed_data(tensor.detach(), mesh, layout)  # type: ignore[arg-type]
            if (left := getattr(tensor._local_tensor, LEFT, None)) is not None:
                setattr(new._local_tensor, LEFT, left)
            tensor._local_tensor, tensor._spec = new._local_tensor, new._spec
    parameter.grad = grad


def partition_of(mesh: DeviceMesh) -> Partition:
    """The partition that a mesh was made for."""
    return Partition(tuple(zip(axis_names(mesh), mesh.shape, strict=True)))


@until_put_back
def _watch_steps() -> None:
    step_on_local_tensors()
    when_put_back(register_optimizer_step_pre_hook(untraced(_shard_state)).remove)


def step_on_current(optimizer: Optimizer, *_: Any) -> None:
    """Replaces an optimizer's parameters by those that have replaced them in models. Called where some are, and before
    each step."""
    for group in optimizer.param_groups if successors else ():
        group["params"][:] = map(current, group["params"])


def _state_of_current(optimizer: Optimizer) -> None:
    """Gives the parameters that have replaced an optimizer's those parameters' states, beside what they have."""
    state = optimizer.state
    for old in [parameter for parameter in state if type(parameter) is Replaced]:
        before, now = state.pop(old), current(old)
        state[now] = {**before, **state[now]} if now in state and isinstance(before, dict) else before


def _shard_state(optimizer: Optimizer, *_: Any) -> None:
    """Shards the parts of an optimizer's state that are whole: loaded ones, and those from before parameters were.

    Called before each step, after `step_on_current`.
    """
    _state_of_current(optimizer)
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


CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
PER_CHANNEL: Any = (nn.BatchNorm1d.__base__, nn.InstanceNorm1d.__base__, nn.GroupNorm, nn.PReLU)


def layer_of(module: nn.Module) -> ChannelMap | None:
    """The channels of a convolution or linear layer; None for any other module."""
    if isinstance(module, nn.Linear):
        return ChannelMap(module.in_features, module.out_features)
    if isinstance(module, TRANSPOSED):
        stride = float(math.prod(module.stride))
        return ChannelMap(module.in_channels, module.out_channels, module.groups, True, stride)
    if isinstance(module, CONVOLUTIONS):
        return ChannelMap(module.in_channels, module.out_channels, module.groups, scale=1 / math.prod(module.stride))
    return None


def parameter_placements(module: nn.Module, algorithm: str, partition: Partition) -> dict[str, tuple[Placement, ...]]:
    """The placements on the partition's axes of each parameter of a module itself (not of its children).

    A convolution's and a linear layer's weight by the algorithm, one of ALGORITHMS; their biases, and the parameters
    of batch, group and instance norms and of PReLU, as channels of y are owned. All other parameters are replicated, as
    are all of them along axes other than ``channel`` and ``filter``, and along axes of one rank.
    """
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    whole = (Replicate(),) * len(partition.axes)
    axes = {name: size for name, size in partition.axes if shards_channels(name) and size > 1}
    vector = tuple(Shard(0) if name in axes else Replicate() for name in partition.names)
    layer = layer_of(module)
    if layer is not None:
        dims = dict(zip(axes, weight_dims(layer, algorithm, axes), strict=True))
        weight = tuple(Shard(dims[name]) if name in dims else Replicate() for name in partition.names)
        return {name: {"weight": weight, "bias": vector}.get(name, whole) for name in own}
    if isinstance(module, PER_CHANNEL):
        return {name: vector if parameter.numel() > 1 else whole for name, parameter in own.items()}
    return dict.fromkeys(own, whole)
