"""The modules of a model, the mesh that each runs on, and their parameters.

They are found at each call, since a program may have changed them in between. A model has hundreds of modules. So a
result is kept, and compared with the model by functions that loop in C. All meshes are over the same ranks.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from distconv.model.replacement import Replaced, current
from distconv.model.strategy import Strategy
from distconv.tensors.mesh import is_the_programs, mesh_like, splits_channels

MODULES, PARAMETERS, BUFFERS = map(operator.attrgetter, ("_modules", "_parameters", "_buffers"))
VALUES: Any = operator.methodcaller("values")
_REFERENT: Any = operator.methodcaller("__call__")


_found: weakref.WeakKeyDictionary[nn.Module, tuple[list[weakref.ref[nn.Module]], tuple[list[int], list[int]]]]
_found = weakref.WeakKeyDictionary()
"""By model: its modules at its last call, as weak references, since the model is one of them; and `_inner` of them."""


def modules_of(model: nn.Module) -> list[nn.Module]:
    """The modules that ``model.modules()`` gives, in the same order."""
    references, inner = _found.get(model, ([], None))
    modules: list[Any] = [*map(_REFERENT, references)]
    if inner is None or None in modules or _inner(modules) != inner:
        modules = [module for _, module in model.named_modules()]
        _found[model] = [*map(weakref.ref, modules)], _inner(modules)
    return modules


def _inner(modules: Sequence[nn.Module]) -> tuple[list[int], list[int]]:
    """How many modules are directly in each, and the ids of these, one list after another."""
    inner = [*map(MODULES, modules)]
    return [*map(len, inner)], [*map(id, chain.from_iterable(map(VALUES, inner)))]


def every_parameter(modules: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters of some modules; what several of them have comes several times."""
    return [x for x in chain.from_iterable(map(VALUES, map(PARAMETERS, modules))) if x is not None]


def parameters_of(
    modules: Iterable[nn.Module], assignments: Mapping[nn.Module, Assignment], mesh: DeviceMesh
) -> tuple[list[Tensor], list[DeviceMesh]]:
    """The parameters of some modules, each once, and the mesh of each; without DTensors that the program has made.

    A parameter's mesh is that of its module; ``mesh`` where none is assigned.
    """
    modules = list(modules)
    parameters = [*chain.from_iterable(map(VALUES, map(PARAMETERS, modules)))]
    kinds = {*map(type, parameters)}
    if assignments or Replaced in kinds:
        meshes = _meshes_of(modules, assignments, mesh)
        return [*meshes], [*meshes.values()]
    parameters = [*dict(zip(map(id, parameters), parameters, strict=True)).values()]
    if kinds != {nn.Parameter}:
        may_be_the_programs = kinds != {nn.Parameter, type(None)}
        parameters = [x for x in parameters if x is not None and not (may_be_the_programs and is_the_programs(x))]
    return parameters, [mesh] * len(parameters)


def meshes_of(
    model: nn.Module, assignments: Mapping[nn.Module, Assignment], mesh: DeviceMesh
) -> dict[Tensor, DeviceMesh]:
    """The mesh of each parameter of a model, as `parameters_of` finds them."""
    return dict(zip(*parameters_of(model.modules(), assignments, mesh), strict=True))


def _meshes_of(
    modules: Sequence[nn.Module], assignments: Mapping[nn.Module, Assignment], mesh: DeviceMesh
) -> dict[Tensor, DeviceMesh]:
    meshes: dict[Tensor, DeviceMesh] = {}
    for module in modules:
        assignment = assignments.get(module)
        own = assignment.mesh if assignment is not None and assignment.fixed else mesh
        parameters = module._parameters
        for name, parameter in parameters.items():
            if type(parameter) is Replaced:  # functional_call has put a parameter back that was sharded meanwhile
                parameter = parameters[name] = current(parameter)
            if parameter is not None and not is_the_programs(parameter):
                meshes.setdefault(parameter, own)
    return meshes


def parameters_of_fsdp(modules: Iterable[nn.Module]) -> set[int]:
    """The ids of the parameters of modules of FSDP2, which may keep them whole from one call to the next.

    FSDP takes the gradients of a module right after its backward, so they have to be there by then.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return set()
    return {id(x) for module in modules if isinstance(module, fsdp.FSDPModule) for x in module.parameters()}


@dataclass(frozen=True)
class Assignment:
    """The mesh of one module."""

    mesh: DeviceMesh  # Where it runs.
    outer: DeviceMesh  # Of the script's tensors outside of all modules, to which outputs are redistributed.
    uniform: bool  # Whether the modules within it run on its mesh too.
    fixed: bool
    """Whether its mesh stays whatever mesh its inputs come from: its parameters are there, or a strategy said so."""
    algorithm: str | None = None  # By which its weight is split over the axes of channels; None for that of its mesh.


def assignments(model: nn.Module, outer: DeviceMesh, strategy: Strategy | None = None) -> dict[nn.Module, Assignment]:
    """The meshes of the model and the modules within it."""
    chosen = strategy.assign(model) if strategy else {}
    meshes = {module: mesh_like(outer, chosen[module][1]) if module in chosen else outer for module in model.modules()}
    fixed = strategy is not None or splits_channels(outer)
    algorithms = {module: strategy.algorithm(pattern) for module, (pattern, _) in chosen.items()} if strategy else {}
    return {
        module: Assignment(
            mesh, outer, all(meshes[inner] == mesh for inner in module.modules()), fixed, algorithms.get(module)
        )
        for module, mesh in meshes.items()
    }
