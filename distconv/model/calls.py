"""Calls of a module: its inputs are redistributed to its mesh, and its parameters are read as DTensors.

The outermost call of a module shards its plain tensor inputs. Until it returns, reading a parameter of any of its
modules gives a DTensor. The parameters that optimizers, state_dict and schedulers see stay what they are.

The modules of one model may run on several meshes. The inputs of a module with a mesh of its own are redistributed to
that mesh, for it and for all modules in it. Operators between the calls of modules run on the mesh of their tensors; if
these come from several meshes, they run on the mesh of the enclosing module.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.agreement.ledger import ledger, note_state
from distconv.model import compiled
from distconv.model.call_inputs import Containers, refuse_images, warn_of_idle
from distconv.model.direct.activation import Activation
from distconv.model.direct.chains.call import halos
from distconv.model.direct.layers import layer_result
from distconv.model.direct.paths import is_open
from distconv.model.model_modules import Assignment, meshes_of
from distconv.model.running import Run, as_direct, for_caller, inside, new_run, on_mesh, within_run
from distconv.model.shard_gather import to_shards
from distconv.model.state_check import checked
from distconv.model.traces import is_tracing_model, tracing
from distconv.model.transforms import is_transformed
from distconv.model.whole_calls import is_for_whole, run_whole, warn_of_whole
from distconv.private_names import COMPILED, lacks
from distconv.rules.normalization.running import is_a_modules
from distconv.tensors import hooks, user_lines
from distconv.tensors.gathering.record import model_call
from distconv.tensors.mesh import is_ours, is_the_programs, whole_group
from distconv.tensors.plain_tensors import plain
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.untraced import untraced
from distconv.transfer.account import ACCOUNT
from distconv.transfer.redistribution import redistributed

assigned: weakref.WeakKeyDictionary[nn.Module, Assignment] = weakref.WeakKeyDictionary()
"""Modules that a program has parallelized."""

loaded: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Modules that have loaded a state, which is to be compared when they are next called."""

_WRAPPERS = AveragedModel, DistributedDataParallel  # Modules that only call the model in them.

_WITHOUT_NUMBERS = "convert all Tensors to FakeTensors"  # In what FakeTensorMode says where it meets others.

_call, _call_uncompiled = nn.Module.__call__, nn.Module._call_impl


def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module.__call__`` on ranks: a module with parameters runs on its mesh, or that of its inputs.

    A wrapper only calls the model in it, whose layers have the names that strategies say.
    """
    if is_dynamo_compiling():
        if is_tracing_model() or next(self.parameters(), None) is None:
            return _call(self, *args, **kwargs)
        return _called_outside_graph(self, *args, **kwargs)
    run = inside.run
    if run is not None and not run.assignments:  # soonest: a model has hundreds of modules
        of_module = self.__dict__
        if "_compiled_call_impl" not in of_module and "dynamo_ctx" not in of_module:  # as `compiled.compiled_call` asks
            result = layer_result(self, *args) if len(args) == 1 and not kwargs else NotImplemented
            return _call_uncompiled(self, *args, **kwargs) if result is NotImplemented else result
    try:
        return _called(self, *args, **kwargs)
    except Exception as error:
        if isinstance(error, AssertionError) and _WITHOUT_NUMBERS in str(error):
            raise UnsupportedOperation(
                f"{type(self).__name__}: a part of a distributed tensor beside tensors without numbers (FakeTensorMode,"
                f" as in functorch.compile); {user_lines.asked_for()}; accepted: torch.compile of the model"
            ) from error
        user_lines.shorten(error, UnsupportedOperation)
        raise


def _called(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
    if inside.whole:
        return _call(module, *args, **kwargs)
    wrapper, module = module, compiled.original(module)
    made = compiled.compiled_call(wrapper)
    if made is not None and (line := lacks(COMPILED)):
        compiled.leave_uncompiled(module, line)
        wrapper, made = module, None
    run = inside.run
    if run is not None:
        if made is not None:
            compiled.leave_uncompiled(module, compiled.PART)
        assignment = run.assignments.get(module)
        if assignment is None:
            return _call_uncompiled(module, *args, **kwargs)
        return _nested(module, assignment, run, args, kwargs)
    if isinstance(module, _WRAPPERS):
        return _call_alone(wrapper, made, args, kwargs)
    for take in hooks.model_calls:
        taken = take(module, args, kwargs)
        if taken is not NotImplemented:
            return taken
    first = next(module.parameters(), None)
    unnamed = first is None and module not in assigned
    if unnamed and made is None:
        if hooks.scripts:
            warn_of_whole(module, (args, kwargs))
        return _call_alone(wrapper, made, args, kwargs)
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    is_distributed = hooks.scripts or (module in assigned and is_transformed())
    if first is not None and is_distributed and is_for_whole(module, leaves):
        return run_whole(_call, module, args, kwargs)
    theirs = next((x.device_mesh for x in leaves if isinstance(x, DTensor) and is_ours(x.device_mesh)), None)
    others = leaves if first is None else [first, *leaves]
    if theirs is None and (unnamed or any(leaf.is_meta for leaf in leaves) or any(map(is_the_programs, others))):
        return _call_alone(wrapper, made, args, kwargs)
    by_script = hooks.scripts and module not in assigned
    known = hooks.scripts[-1].assignments(module) if by_script else assigned
    assignment = known.get(module)
    mesh = assignment.mesh if assignment is not None and (assignment.fixed or theirs is None) else theirs
    if mesh is None:
        return _call_alone(wrapper, made, args, kwargs)
    whole_group(mesh)  # raises where the program has destroyed the process group of the mesh
    given = args, kwargs
    args, kwargs = _inputs_in_shards(module, mesh, args, kwargs, whole=theirs is None)
    fixed = assignment if assignment is not None and assignment.fixed else None
    outer = None if fixed is None else fixed.outer
    if made is not None and fixed is not None and not (fixed.uniform and theirs in (None, mesh)):
        compiled.leave_uncompiled(module, compiled.MESHES)
    elif made is not None:
        with contextlib.suppress(compiled.NotCompiled), model_call():
            result = compiled.run(module, made, mesh, lambda: meshes_of(module, known, mesh), args, kwargs)
            return for_caller(result, type(module).__name__, outer, plain=bool(hooks.scripts) and theirs is None)
    recording = user_lines.is_new(module, tuple(leaf.shape for leaf in leaves))
    if recording:
        hooks.before_operators.append(user_lines.keep_line)
    try:
        direct = is_open() and (fixed is None or (fixed.uniform and fixed.outer == mesh))
        if direct:
            args, kwargs = as_direct((args, kwargs))
        containers = Containers(given, (args, kwargs))
        chains = halos(module, args, kwargs) if direct else contextlib.nullcontext()
        if fixed is None:
            run = new_run(module, {}, mesh, direct)
            with _checked(module, run), within_run(run), chains:
                result = _call_uncompiled(module, *args, **kwargs)
        else:
            run = new_run(module, known, mesh, direct, several=not fixed.uniform)
            with _checked(module, run), within_run(run), chains:
                result = _nested(module, fixed, run, args, kwargs)
        result = _as_dtensors(result)
        containers.give_back(_as_dtensors)
        return for_caller(result, type(module).__name__, outer, plain=bool(hooks.scripts) and theirs is None)
    finally:
        if recording:
            hooks.before_operators.remove(user_lines.keep_line)


def _checked(module: nn.Module, run: Run) -> contextlib.AbstractContextManager[None]:
    """A context in which a run's parameters and buffers are checked; not while backward recomputes a part of it."""
    is_call = torch._C._current_graph_task_id() == -1
    return checked(module, run.modules, run.uses, run.mesh) if is_call else contextlib.nullcontext()


def _as_dtensors(result: Any) -> Any:
    return tree_map_only(Activation, lambda x: x.as_dtensor(), result)


def _call_alone(module: nn.Module, made: Any, args: Any, kwargs: Any) -> Any:
    """Calls a module that does not run distributed."""
    if made is None:
        return _call(module, *args, **kwargs)
    with tracing():
        return _call(module, *args, **kwargs)


_called_outside_graph = untraced(_called)
"""Runs where a compiled function of the program calls a model: its graph ends there."""


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
        _note(module, mesh, args, kwargs, whole)
    if not whole:
        return args, kwargs
    dims = max((leaf.dim() for leaf in leaves), default=0)
    return tree_map_only(Tensor, lambda x: to_shards(x, mesh, dims), (args, kwargs))


def _inputs(module: nn.Module, args: Any, kwargs: Any) -> Iterator[tuple[str, Any]]:
    for name, value in (*((str(place), each) for place, each in enumerate(args, 1)), *kwargs.items()):
        yield f"input {name} of {type(module).__name__}.forward", value


def _note(module: nn.Module, mesh: DeviceMesh, args: Any, kwargs: Any, whole: bool) -> None:
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


_called_in_turn: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_call(module: nn.Module, ranks: DeviceMesh, args: Any, kwargs: Any) -> None:
    """Notes a call with whole inputs of which each rank computes several parts in turn."""
    if torch._C._current_graph_task_id() != -1:  # backward recomputes a part of an earlier call
        return
    ACCOUNT.called()
    if module not in _called_in_turn:
        _called_in_turn.add(module)
        note_state(module, ranks)
    _note(module, ranks, args, kwargs, whole=True)


def _note_plain_operand(func: Any, index: int, x: Tensor, mesh: DeviceMesh) -> None:
    """Notes a plain operand of a function of DTensors: it counts as replicated, so all ranks must have equal ones."""
    if is_a_modules(x):  # parameters and buffers are compared by `distconv.model.state_check`, a few in each call
        return
    noted = ledger(mesh)
    if noted is not None:
        noted.note_once(f"{func._schema.arguments[index].name} of {func._schema.name.replace('::', '.')}", x)


hooks.plain_operands.append(_note_plain_operand)


def _nested(module: nn.Module, assignment: Assignment, run: Run, args: Any, kwargs: Any) -> Any:
    """Calls a module on its own mesh. Its inputs are redistributed there if all modules within it run there, too."""
    before = run.assignments, run.mesh
    run.mesh = assignment.mesh
    try:
        if not assignment.uniform:
            return _call_uncompiled(module, *args, **kwargs)
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
        result = _call_uncompiled(module, *args, **kwargs)
        containers.give_back()
        for x, here, version in moved:
            if version is None or _version(here) != version:  # as an in-place ReLU changes its input
                x.copy_(redistributed(here, x.device_mesh, x.placements))
        return result
    finally:
        run.assignments, run.mesh = before


def _version(x: Tensor) -> int | None:
    return None if x.is_inference() else x._version
