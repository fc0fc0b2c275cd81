"""The outermost call of a model on ranks: where it runs, its inputs in shards, and its results for the caller; and
calls of modules within it that run on meshes of their own."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.agreement.ledger import ledger, note_state
from distconv.model import compiled
from distconv.model.call_inputs import Containers, refuse_images, warn_of_idle
from distconv.model.direct.activation import Activation
from distconv.model.direct.chains.call import halos
from distconv.model.direct.paths import is_open, temporarily
from distconv.model.gradients import is_of_a_model
from distconv.model.model_modules import Assignment, meshes_of
from distconv.model.old_hooks import call_uncompiled
from distconv.model.running import Run, as_direct, for_caller, new_run, on_mesh, within_run
from distconv.model.shard_gather import to_shards
from distconv.model.state_check import checked
from distconv.tensors import hooks, user_lines
from distconv.tensors.gathering.record import model_call
from distconv.tensors.hooks import Script
from distconv.tensors.mesh import is_ours, is_the_programs, whole_group
from distconv.tensors.plain_tensors import plain
from distconv.transfer.account import ACCOUNT
from distconv.transfer.redistribution import redistributed

loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that have loaded a state, which is to be compared when they are next called."""


@dataclass(frozen=True)
class OutermostCall:
    """The call of a model that runs distributed."""

    module: nn.Module  # The model.
    mesh: DeviceMesh  # On which it runs.
    fixed: Assignment | None  # Its own, if the program has parallelized it; else it runs on the mesh of its inputs.
    known: Mapping[nn.Module, Assignment]  # The assignments of modules, those within the model among them.
    of_inputs: DeviceMesh | None  # The mesh of its inputs; None where these are plain tensors, equal on all ranks.
    shapes: tuple[torch.Size, ...]  # Of its inputs.
    is_script: bool  # Whether a script is run, whose results are plain where its inputs are.

    def result(self, made: Any, args: Any, kwargs: Any) -> Any:
        """What the model returns. ``made``: its compiled call; None for a model that is not compiled."""
        given = args, kwargs
        args, kwargs = _inputs_in_shards(self.module, self.mesh, args, kwargs, whole=self.of_inputs is None)
        fixed = self.fixed
        if made is not None and fixed is not None and not (fixed.uniform and self.of_inputs in (None, self.mesh)):
            compiled.leave_uncompiled(self.module, compiled.MESHES)
        elif made is not None:
            with contextlib.suppress(compiled.NotCompiled), model_call():
                result = compiled.run(self.module, made, self.mesh, self._meshes, args, kwargs)
                return self._for_caller(result)
        recording = user_lines.is_new(self.module, self.shapes)
        if recording:
            hooks.before_operators.append(user_lines.keep_line)
        try:
            return self._for_caller(self._uncompiled(given, args, kwargs))
        finally:
            if recording:
                hooks.before_operators.remove(user_lines.keep_line)

    def _uncompiled(self, given: Any, args: Any, kwargs: Any) -> Any:
        """``given``: the arguments of the caller, in whose lists and dicts it finds what the model has put there."""
        module, fixed = self.module, self.fixed
        direct = is_open() and (fixed is None or (fixed.uniform and fixed.outer == self.mesh))
        if direct:
            args, kwargs = as_direct((args, kwargs))
        containers = Containers(given, (args, kwargs))
        chains = halos(module, args, kwargs) if direct else contextlib.nullcontext()
        if fixed is None:
            run = new_run(module, {}, self.mesh, direct)
        else:
            run = new_run(module, self.known, self.mesh, direct, several=not fixed.uniform)
        with _checked(module, run), within_run(run), chains:
            if fixed is None:
                result = call_uncompiled(module, args, kwargs)
            else:
                result = nested(module, fixed, run, args, kwargs)
        result = _as_dtensors(result)
        containers.give_back(_as_dtensors)
        return result

    def _meshes(self) -> Any:
        return meshes_of(self.module, self.known, self.mesh)

    def _for_caller(self, result: Any) -> Any:
        outer = None if self.fixed is None else self.fixed.outer
        is_plain = self.is_script and self.of_inputs is None
        return for_caller(result, type(self.module).__name__, outer, plain=is_plain)


def outermost_call(
    module: nn.Module, assigned: Mapping[nn.Module, Assignment], script: Script | None, leaves: list[Tensor]
) -> OutermostCall | None:
    """The call of a model with these tensors; None where it does not run distributed.

    ``assigned``: the assignments of modules that the program has parallelized. ``script``: the one that is run.
    """
    of_inputs = next((x.device_mesh for x in leaves if isinstance(x, DTensor) and is_ours(x.device_mesh)), None)
    first = next(iter(module.parameters()), None)
    if of_inputs is None:
        is_unnamed = first is None and module not in assigned
        others = leaves if first is None else [first, *leaves]
        if is_unnamed or any(leaf.is_meta for leaf in leaves) or any(map(is_the_programs, others)):
            return None
    known = assigned if script is None or module in assigned else script.assignments(module)
    assignment = known.get(module)
    is_fixed = assignment is not None and assignment.fixed
    mesh = assignment.mesh if assignment is not None and (is_fixed or of_inputs is None) else of_inputs
    if mesh is None:
        return None
    whole_group(mesh)  # raises where the program has destroyed the process group of the mesh
    shapes = tuple(leaf.shape for leaf in leaves)
    return OutermostCall(module, mesh, assignment if is_fixed else None, known, of_inputs, shapes, script is not None)


def _checked(module: nn.Module, run: Run) -> contextlib.AbstractContextManager[None]:
    """A context in which a run's parameters and buffers are checked; not while backward recomputes a part of it."""
    is_call = torch._C._current_graph_task_id() == -1
    return checked(module, run.modules, run.uses, run.mesh) if is_call else contextlib.nullcontext()


def _as_dtensors(result: Any) -> Any:
    return tree_map_only(Activation, lambda x: x.as_dtensor(), result)


def _inputs_in_shards(module: nn.Module, mesh: DeviceMesh, args: Any, kwargs: Any, whole: bool) -> tuple[Any, Any]:
    """The inputs of an outermost call in shards. Inputs that are whole must be equal on all ranks, and are cut."""
    is_call = torch._C._current_graph_task_id() == -1  # else backward recomputes a part of an earlier call
    if is_call:
        ACCOUNT.called()
    if whole:
        args, kwargs = tree_map_only(Tensor, plain, (args, kwargs))
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        warn_of_idle(type(module).__name__, mesh, leaves)
        for what, value in _inputs(module, args, kwargs):
            refuse_images(value, what, mesh)
    if is_call:
        note_inputs(module, mesh, args, kwargs, whole)
    if not whole:
        return args, kwargs
    dims = max((leaf.dim() for leaf in leaves), default=0)
    # A parameter of another model stays itself, as a loss that is given one may ask for its gradient.
    return tree_map_only(Tensor, lambda x: x if is_of_a_model(x) else to_shards(x, mesh, dims), (args, kwargs))


def _inputs(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for name, value in (*((str(place), each) for place, each in enumerate(args, 1)), *kwargs.items()):
        yield f"input {name} of {type(module).__name__}.forward", value


def note_inputs(module: nn.Module, mesh: DeviceMesh, args: Any, kwargs: Any, whole: bool) -> None:
    """Notes an outermost call, its inputs where they are whole, and what the module has loaded since the last one."""
    noted = ledger(mesh)
    if noted is None:
        return
    for what, value in _inputs(module, args, kwargs) if whole else ():
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor):
                noted.note(what, leaf)
    if loaded and not loaded.isdisjoint(module.modules()):
        loaded.difference_update(module.modules())
        note_state(module, mesh)
    noted.called(module)


def nested(module: nn.Module, assignment: Assignment, run: Run, args: Any, kwargs: Any) -> Any:
    """Calls a module on its own mesh. Its inputs are redistributed there if all modules within it run there, too."""
    # Within a module whose modules run on its mesh nothing more is to be redistributed.
    with temporarily(run, mesh=assignment.mesh, assignments={} if assignment.uniform else run.assignments):
        if not assignment.uniform:
            return call_uncompiled(module, args, kwargs)
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


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version
