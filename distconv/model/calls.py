"""Calls of a module: its inputs are redistributed to its mesh, and its parameters are read as DTensors.

The outermost call of a module shards its plain tensor inputs. Until it returns, reading a parameter of any of its
modules gives a DTensor. The parameters that optimizers, state_dict and schedulers see stay what they are.

The modules of one model may run on several meshes. The inputs of a module with a mesh of its own are redistributed to
that mesh, for it and for all modules in it. Operators between the calls of modules run on the mesh of their tensors; if
these come from several meshes, they run on the mesh of the enclosing module.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.modules.module import _has_any_global_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from distconv.agreement.ledger import ledger, note_state
from distconv.model import compiled
from distconv.model.direct.activation import Activation
from distconv.model.direct.paths import layers, paths, running
from distconv.model.model_modules import Assignment
from distconv.model.old_hooks import call_uncompiled
from distconv.model.outermost_calls import nested, note_inputs, outermost_call
from distconv.model.running import inside
from distconv.model.traces import is_tracing_model, tracing
from distconv.model.transforms import is_transformed
from distconv.model.whole_calls import is_for_whole, run_whole, warn_of_whole
from distconv.private_names import COMPILED, lacks
from distconv.rules.normalization.running import is_a_modules
from distconv.tensors import hooks, user_lines
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.untraced import untraced
from distconv.transfer.account import ACCOUNT

assigned: weakref.WeakKeyDictionary[nn.Module, Assignment] = weakref.WeakKeyDictionary()
"""Modules that a program has parallelized."""

_WRAPPERS = AveragedModel, DistributedDataParallel  # Modules that only call the model in them.

_WITHOUT_NUMBERS = "convert all Tensors to FakeTensors"  # In what FakeTensorMode says where it meets others.

_call, _call_uncompiled = nn.Module.__call__, nn.Module._call_impl


def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """``nn.Module.__call__`` on ranks: a module with parameters runs on its mesh, or that of its inputs.

    A wrapper only calls the model in it, whose layers have the names that strategies say.
    """
    if is_dynamo_compiling():
        if is_tracing_model() or next(iter(self.parameters()), None) is None:
            return _call(self, *args, **kwargs)
        return _called_outside_graph(self, *args, **kwargs)
    run = inside.run
    if run is not None and not run.assignments:  # soonest: a model has hundreds of modules
        of_module = self.__dict__
        # Whether it is compiled, as `compiled.compiled_call` asks, or has hooks that need care.
        if (
            "_compiled_call_impl" not in of_module
            and "dynamo_ctx" not in of_module
            and not of_module["_backward_hooks"]
        ):
            if type(self) in layers and len(args) == 1 and not kwargs:
                result = _layer_result(self, args[0])
                if result is not NotImplemented:
                    return result
            return _call_uncompiled(self, *args, **kwargs)
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


def _layer_result(module: nn.Module, x: Any) -> Any:
    """The result of one of the `layers` of a running model; NotImplemented where it is to be called as others are."""
    kind: Any = type(module)
    compute, forward, name, method, function, real = layers[kind]
    if type(x) is not Activation or running.closed or getattr(functional, function) is not real:
        return NotImplemented
    own = module.__dict__
    if kind.forward is not forward or getattr(kind, name) is not method or "forward" in own or name in own:
        return NotImplemented
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    if hooks or _has_any_global_hook() or torch._C._is_torch_function_mode_enabled():
        return NotImplemented
    return compute(paths[real], module, x)


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
            return call_uncompiled(module, args, kwargs)
        return nested(module, assignment, run, args, kwargs)
    if isinstance(module, _WRAPPERS):
        return _call_alone(wrapper, made, args, kwargs)
    for take in hooks.model_calls:
        taken = take(module, args, kwargs)
        if taken is not NotImplemented:
            return taken
    has_parameters = next(iter(module.parameters()), None) is not None
    if not has_parameters and made is None and module not in assigned:
        if hooks.scripts:
            warn_of_whole(module, (args, kwargs))
        return _call_alone(wrapper, made, args, kwargs)
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    script = hooks.scripts[-1] if hooks.scripts else None
    is_distributed = script is not None or (module in assigned and is_transformed())
    if has_parameters and is_distributed and is_for_whole(module, leaves):
        return run_whole(_call, module, args, kwargs)
    distributed = outermost_call(module, assigned, script, leaves)
    del leaves  # The module may replace tensors in a list that it is given, which are free then.
    if distributed is None:
        return _call_alone(wrapper, made, args, kwargs)
    return distributed.result(made, args, kwargs)


def _call_alone(module: nn.Module, made: Any, args: Any, kwargs: Any) -> Any:
    """Calls a module that does not run distributed."""
    if made is None:
        return _call(module, *args, **kwargs)
    with tracing():
        return _call(module, *args, **kwargs)


_called_outside_graph = untraced(_called)
"""Runs where a compiled function of the program calls a model: its graph ends there."""


_called_in_turn: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_call(module: nn.Module, ranks: DeviceMesh, args: Any, kwargs: Any) -> None:
    """Notes a call with whole inputs of which each rank computes several parts in turn."""
    if torch._C._current_graph_task_id() != -1:  # backward recomputes a part of an earlier call
        return
    ACCOUNT.called()
    if module not in _called_in_turn:
        _called_in_turn.add(module)
        note_state(module, ranks)
    note_inputs(module, ranks, args, kwargs, whole=True)


def _note_plain_operand(func: Any, index: int, x: Tensor, mesh: DeviceMesh) -> None:
    """Notes a plain operand of a function of DTensors: it counts as replicated, so all ranks must have equal ones."""
    if is_a_modules(x):  # parameters and buffers are compared by `distconv.model.state_check`, a few in each call
        return
    noted = ledger(mesh)
    if noted is not None:
        noted.note_once(f"{func._schema.arguments[index].name} of {func._schema.name.replace('::', '.')}", x)


hooks.plain_operands.append(_note_plain_operand)
