"""What calling a module does: its inputs come to its mesh, and its parameters are read as DTensors.

At the outermost call of a module its plain tensor inputs are sharded and, until it returns, reading a parameter from
any of its modules gives a DTensor. The parameters that optimizers, state_dict and schedulers see stay what they are.

The modules of one model may run on several meshes. The inputs of a module that runs on one mesh, with all modules in
it, are brought there. What a module computes between the calls of others runs on the mesh of its tensors; where these
come from several meshes, on the module's own.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv import user_lines
from distconv.agreement.ledger import ledger, note_state
from distconv.direct.activation import Activation, from_dtensor
from distconv.direct.paths import is_open
from distconv.mesh import is_ours, is_the_programs
from distconv.model import compiled
from distconv.model.assignment import Assignment
from distconv.model.containers import Containers
from distconv.model.gradients import uses
from distconv.model.images import refuse_images
from distconv.model.meeting import Meeting, brought
from distconv.model.shard_gather import to_shards
from distconv.plain_tensors import plain, watchers
from distconv.refusal import UnsupportedOperation
from distconv.rules.normalization.running import is_a_modules, waiting
from distconv.rules.registry import checks
from distconv.transfer.redistribution import relaid


class Script(Protocol):
    """A script whose modules run distributed."""

    def assignments(self, module: nn.Module) -> Mapping[nn.Module, Assignment]:
        """Where the module of an outermost call, and those within it, run."""


assigned: weakref.WeakKeyDictionary[nn.Module, Assignment] = weakref.WeakKeyDictionary()
"""Modules that a program has parallelized."""

loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that have loaded a state, which is to be compared when they are next called."""

scripts: list[Script] = []
"""The scripts being run; at most one, and none in a program."""


class _Reading(dict[str, Any]):
    """A module's parameters while the model runs: reading one gives its DTensor."""

    def __init__(self, plain: dict[str, Any], use: Callable[[Tensor], Tensor]) -> None:
        super().__init__(plain)
        self.use = use

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        return value if value is None else self.use(value)


@dataclass
class _Run:
    """An outermost call: where its modules run, and the mesh of the innermost one now."""

    assignments: Mapping[nn.Module, Assignment]
    mesh: DeviceMesh

    def mesh_of(self, module: nn.Module) -> DeviceMesh:
        assignment = self.assignments.get(module)
        return assignment.mesh if assignment is not None and assignment.fixed else self.mesh


class _Thread(threading.local):
    run: _Run | None = None


_inside = _Thread()

_call = nn.Module.__call__

_call_uncompiled = nn.Module._call_impl


def _meshes(modules: Iterable[nn.Module], run: _Run) -> dict[Tensor, DeviceMesh]:
    """The mesh of each parameter of some modules, that of the one that holds it."""
    meshes: dict[Tensor, DeviceMesh] = {}
    for module in modules:
        if module._parameters:
            mesh = run.mesh_of(module)
            for parameter in module._parameters.values():
                if parameter is not None and not is_the_programs(parameter):
                    meshes.setdefault(parameter, mesh)
    return meshes


def _within(module: nn.Module, found: dict[nn.Module, None]) -> dict[nn.Module, None]:
    """What `modules` gives, in its order and in a third of its time."""
    found[module] = None
    for inner in module._modules.values():
        if inner is not None and inner not in found:
            _within(inner, found)
    return found


@contextlib.contextmanager
def _running(model: nn.Module, run: _Run, direct: bool) -> Iterator[None]:
    everything = list(_within(model, {}))
    modules = [(module, module._parameters) for module in everything if module._parameters]
    use = uses(model, _meshes(everything, run), direct)
    for module, own in modules:
        module.__dict__["_parameters"] = _Reading(own, use)
    _inside.run = run
    try:
        with waiting(everything):
            yield
    finally:
        _inside.run = None
        for module, own in modules:
            module.__dict__["_parameters"] = own


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module.__call__`` on ranks: a module with parameters runs on its mesh, or that of its inputs.

    An average of a model is a wrapper that only calls the model in it, whose layers have the names that strategies say.
    """
    if torch.compiler.is_dynamo_compiling():
        if compiled.is_tracing_model or next(module.parameters(), None) is None:
            return _call(module, *args, **kwargs)
        return _beyond_graphs(module, *args, **kwargs)
    run = _inside.run
    if run is not None and not run.assignments and not compiled.is_wrapped(module):
        return _call_uncompiled(module, *args, **kwargs)  # soonest: a model has hundreds of modules
    try:
        return _called(module, *args, **kwargs)
    except Exception as error:
        user_lines.shorten(error, UnsupportedOperation)
        raise


def _called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    wrapper, module = module, compiled.original(module)
    made = compiled.maker(wrapper)
    run = _inside.run
    if run is not None:
        if made is not None:
            compiled.leave(module, compiled.PART)
        assignment = run.assignments.get(module)
        if assignment is None:
            return _call_uncompiled(module, *args, **kwargs)
        return _nested(module, assignment, run, args, kwargs)
    first = next(module.parameters(), None)
    if first is None or isinstance(module, AveragedModel):
        return _call_alone(wrapper, made, args, kwargs)
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    theirs = next(
        (leaf.device_mesh for leaf in leaves if isinstance(leaf, DTensor) and is_ours(leaf.device_mesh)), None
    )
    if theirs is None and (is_the_programs(first) or any(leaf.is_meta or is_the_programs(leaf) for leaf in leaves)):
        return _call_alone(wrapper, made, args, kwargs)
    known: Mapping[nn.Module, Assignment] = assigned
    if module not in assigned and scripts:
        known = scripts[-1].assignments(module)
    assignment = known.get(module)
    mesh = assignment.mesh if assignment is not None and (assignment.fixed or theirs is None) else theirs
    if mesh is None:
        return _call_alone(wrapper, made, args, kwargs)
    given = args, kwargs
    args, kwargs = _entering(module, mesh, args, kwargs, whole=theirs is None)
    fixed = assignment if assignment is not None and assignment.fixed else None
    if made is not None and fixed is not None and not (fixed.uniform and theirs in (None, mesh)):
        compiled.leave(module, compiled.MESHES)
    elif made is not None:
        with contextlib.suppress(compiled.NotCompiled):
            here = _Run(known, mesh)
            result = compiled.run(module, made, mesh, lambda: _meshes(module.modules(), here), args, kwargs)
            return result if fixed is None else tree_map_only(DTensor, lambda y: brought(fixed.outer, y), result)
    recording = user_lines.is_new(module, tuple(leaf.shape for leaf in leaves))
    if recording:
        checks.append(user_lines.keep_line)
    try:
        direct = is_open() and (fixed is None or (fixed.uniform and fixed.outer == mesh))
        if direct:
            args, kwargs = tree_map_only(DTensor, _direct, (args, kwargs))
        containers = Containers(given, (args, kwargs))
        if fixed is None:
            with _running(module, _Run({}, mesh), direct):
                result = _call_uncompiled(module, *args, **kwargs)
        else:
            run = _Run(known, mesh)
            meeting = contextlib.nullcontext() if fixed.uniform else Meeting(lambda: run.mesh)
            with _running(module, run, direct), meeting:
                result = _nested(module, fixed, run, args, kwargs)
        # What a checkpoint computes again in backward is given activations, and gives them, as the first time.
        leaving = (lambda y: y) if any(type(leaf) is Activation for leaf in leaves) else _as_dtensors
        result = leaving(result)
        containers.give_back(leaving)
        return result if fixed is None else tree_map_only(DTensor, lambda y: brought(fixed.outer, y), result)
    finally:
        if recording:
            checks.remove(user_lines.keep_line)


def _as_dtensors(result: Any) -> Any:
    return tree_map_only(Activation, Activation.as_dtensor, result)


def _call_alone(module: nn.Module, made: Any, args: Any, kwargs: Any) -> Any:
    """Calls a module that does not run distributed."""
    if made is None:
        return _call(module, *args, **kwargs)
    with compiled.tracing():
        return _call(module, *args, **kwargs)


_beyond_graphs = _disable_dynamo(_called)
"""What a compiled function of the program does where it calls a model: its graph ends there."""


def _direct(x: DTensor) -> DTensor:
    return from_dtensor(x) if type(x) is DTensor and is_ours(x.device_mesh) else x


def _entering(module: nn.Module, mesh: DeviceMesh, args: Any, kwargs: Any, whole: bool) -> tuple[Any, Any]:
    """The inputs of an outermost call. Where they are whole on every rank, all must hold the same: each is cut."""
    noted = ledger(mesh) if torch._C._current_graph_task_id() == -1 else None  # in backward: something computed again
    if whole:
        args, kwargs = tree_map_only(Tensor, plain, (args, kwargs))
        for name, value in (*((str(place), each) for place, each in enumerate(args, 1)), *kwargs.items()):
            what = f"input {name} of {type(module).__name__}.forward"
            refuse_images(value, what, mesh)
            for leaf in tree_leaves(value):
                if noted is not None and isinstance(leaf, Tensor):
                    noted.note(what, leaf)
    if noted is not None:
        if loaded and not loaded.isdisjoint(module.modules()):
            loaded.difference_update(module.modules())
            note_state(module, mesh)
        noted.called(module)
    return tree_map_only(Tensor, lambda x: to_shards(x, mesh), (args, kwargs)) if whole else (args, kwargs)


def _beside(func: Any, index: int, x: Tensor, mesh: DeviceMesh) -> None:
    """A plain tensor counts as replicated beside a DTensor: all ranks must hold the same."""
    if is_a_modules(x):  # which come by turns
        return
    noted = ledger(mesh)
    if noted is not None:
        noted.note_once(f"{func._schema.arguments[index].name} of {func._schema.name.replace('::', '.')}", x)


watchers.append(_beside)


def _nested(module: nn.Module, assignment: Assignment, run: _Run, args: Any, kwargs: Any) -> Any:
    """Calls a module on its own mesh. Its inputs are brought there if all modules within it run there, too."""
    before = run.assignments, run.mesh
    run.mesh = assignment.mesh
    try:
        if not assignment.uniform:
            return _call_uncompiled(module, *args, **kwargs)
        run.assignments = {}  # within it nothing more is to be brought
        came: list[tuple[DTensor, DTensor, int | None]] = []

        def bring(x: DTensor) -> DTensor:
            here = brought(assignment.mesh, x)
            if here is not x:
                came.append((x, here, _version(here)))
            return here

        given = args, kwargs
        args, kwargs = tree_map_only(DTensor, bring, given)
        containers = Containers(given, (args, kwargs))
        result = _call_uncompiled(module, *args, **kwargs)
        containers.give_back()
        for x, here, version in came:
            if version is None or _version(here) != version:  # as an in-place ReLU changes its input
                x.copy_(relaid(here, x.device_mesh, x.placements))
        return result
    finally:
        run.assignments, run.mesh = before


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version
