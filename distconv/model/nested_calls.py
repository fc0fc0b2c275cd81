"""Calls of modules within a model that run on meshes of their own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from distconv.model.call_inputs import Containers
from distconv.model.model_modules import Assignment
from distconv.model.old_hooks import call_uncompiled
from distconv.model.running import Run, on_mesh
from distconv.transfer.redistribution import redistributed


def nested(module: nn.Module, assignment: Assignment, run: Run, args: Any, kwargs: Any) -> Any:
    """Calls a module on its own mesh. Its inputs are redistributed there if all modules within it run there, too."""
    before = run.assignments, run.mesh
    run.mesh = assignment.mesh
    try:
        if not assignment.uniform:
            return call_uncompiled(module, args, kwargs)
        run.assignments = {}  # within it nothing more is to be redistributed
        moved: list[tuple[DTensor, DTensor, int | None]] = []

        def move(x: DTensor) -> DTensor:
            here = on_mesh(assignment.mesh, x)
            if here is not x:
                moved.append((x, here, _version(here)))
            return here

        given = args, kwargs
        args, kwargs = tree_map_only(DTensor, move, given)
        containers = Containers(given, (args, kwargs))
        result = call_uncompiled(module, args, kwargs)
        containers.give_back()
        for x, here, version in moved:
            if version is None or _version(here) != version:  # as an in-place ReLU changes its input
                x.copy_(redistributed(here, x.device_mesh, x.placements))
        return result
    finally:
        run.assignments, run.mesh = before


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version
