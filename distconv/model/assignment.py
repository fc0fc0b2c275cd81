"""Assignment: the mesh that each module of a model runs on; all meshes are over the same ranks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from distconv.model.strategy import Strategy
from distconv.tensors.mesh import mesh_like, splits_channels


@dataclass(frozen=True)
class Assignment:
    """The mesh of one module.

    mesh: where it runs.
    outer: the mesh of the script's tensors outside of all modules, to which outputs are redistributed.
    uniform: whether the modules within it run on its mesh too.
    fixed: its mesh stays whatever mesh its inputs come from: its parameters are there, or a strategy said so.
    algorithm: by which its weight is split over the axes of channels; None for that of its mesh.
    """

    mesh: DeviceMesh
    outer: DeviceMesh
    uniform: bool
    fixed: bool
    algorithm: str | None = None


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
