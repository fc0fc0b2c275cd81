"""Calls of models that every rank computes whole: traced, exported, transformed and scripted models, and first calls of
models with lazy modules; and calls in a process that a rank has forked, such as a worker of a DataLoader.

A model is traced for the graph or the shapes that a single process would find. `torch.func` transforms plain operators
(see `distconv.model.transforms`). The operators of a scripted model are executed in C++, where distconv does not see
them. Lazy modules make their parameters while they are called, from the shapes of whole inputs, and become modules of
another class. Every rank computes the whole model, so all ranks agree.
"""

from __future__ import annotations

import contextlib
import functools
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from distconv.agreement.ledger import forget_all
from distconv.model.call_inputs import Containers
from distconv.model.direct.paths import temporarily
from distconv.model.model_modules import BUFFERS, PARAMETERS, VALUES, modules_of
from distconv.model.replacement import current
from distconv.model.running import inside
from distconv.model.shard_gather import gather, whole
from distconv.model.transforms import is_transformed
from distconv.tensors import hooks
from distconv.tensors.mesh import end_in_child, is_ours, whole_group
from distconv.tensors.replacements import in_place_of
from distconv.tensors.user_lines import asked_for
from distconv.transfer.tracing import forget_plans, is_traced
from mucudnn.process import substituted, warn

_FUNCTIONS = (
    *((torch.jit, name) for name in ("trace", "trace_module", "_get_trace_graph")),
    *((library, "export") for library in (torch.onnx, torch.export)),
)
"""Functions that make a graph of their first argument, a model."""

_made_from: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""From each model that torch.jit has made to the original. They share parameters until these are sharded."""

_scripted: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

_complete: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # Models without lazy modules that are still to be called.


_PLAIN = {Tensor, nn.Parameter, type(None)}

LARGE = 16 << 20  # A line is printed for a module without parameters if its inputs have at least so many bytes.


def warn_of_whole(module: nn.Module, given: Any) -> None:
    """Prints a line for a module without parameters that is called with large plain tensors: every rank computes it.

    Most such modules are losses, or prepare data.
    """
    tensors = [x for x in tree_leaves(given) if isinstance(x, Tensor)]
    if sum(x.nbytes for x in tensors) >= LARGE and not any(x.is_meta or isinstance(x, DTensor) for x in tensors):
        why = "it has no parameters, and its inputs are plain tensors"
        warn(f"{type(module).__name__}, called {asked_for()}, runs whole on every rank: {why}", "distconv")


def is_for_whole(module: nn.Module, given: Sequence[Tensor]) -> bool:
    """Whether a call of a model with these tensors is to be computed whole on every rank; a line says why."""
    why = why_whole(module, given)
    if why and why != _FOLLOWED:
        warn(f"{type(module).__name__}, called {asked_for()}, runs whole on every rank: {why}", "distconv")
    return bool(why)


_FOLLOWED = "it is traced, exported or counted"


def why_whole(module: nn.Module, given: Sequence[Tensor]) -> str:
    """Why a call of a model with these tensors is to be computed whole; empty if it is not."""
    tracing: bool = torch.jit.is_tracing()  # type: ignore[attr-defined]
    if tracing or any(is_traced(x) for x in given) or _is_counted():
        return _FOLLOWED
    if is_transformed():
        return "it is called within a transform"
    scripted = _scripted.get(module)
    if scripted is None:
        scripted = _scripted[module] = any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())
    if scripted:
        return "it is, or has, a module of torch.jit"
    if module not in _complete:
        becoming = any(isinstance(each, LazyModuleMixin) and each.cls_to_become for each in module.modules())
        if becoming or any(is_lazy(x) for x in (*module.parameters(), *module.buffers())):
            return "its lazy modules become ordinary ones in this call"
        _complete.add(module)
    return ""


def _is_counted() -> bool:
    """Whether torch's FLOP counter is active, without gradients."""
    if torch.is_grad_enabled():
        return False
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(getattr(mode, "counter", None), FlopCounterMode) for mode in modes)


def run_whole(call: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls a module with whole tensors; all modules within it run likewise. Collective where an input has shards."""
    wholes = tree_map_only(DTensor, lambda x: gather(x) if is_ours(x.device_mesh) else x, (args, kwargs))
    containers = Containers((args, kwargs), wholes)
    for each in filter(_made_from.__contains__, modules_of(module)) if _made_from else ():
        _follow(each)
    with _whole_state(module, differentiable=is_transformed()), temporarily(inside, whole=True):
        result = call(module, *wholes[0], **wholes[1])
    containers.give_back()
    return result


def _follow(scripted: nn.Module) -> None:
    """Copies a model's parameters that have been sharded since to the module that torch.jit made of it. Collective."""
    model = _made_from[scripted]()
    if model is None:
        return
    own = dict(scripted.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in own and isinstance(parameter, DTensor) and is_ours(parameter.device_mesh):
                own[name].copy_(whole(parameter.detach()))  # type: ignore[arg-type]


@contextlib.contextmanager
def graphs_of_whole_models() -> Iterator[None]:
    """A context in which functions that make a graph of a model see whole parameters. All ranks must call it."""
    with contextlib.ExitStack() as undo:
        for library, name in (*_FUNCTIONS, (torch.jit, "script")):
            finding = functools.partial(_with_whole_model, 2 if name == "script" else 0)
            undo.enter_context(substituted(library, **{name: in_place_of(getattr(library, name), finding)}))
        yield


def _with_whole_model(frames: int, real: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    if frames:  # torch.jit.script looks names up in the caller's frame, which is so many further
        kwargs["_frames_up"] = kwargs.get("_frames_up", 0) + frames
    whole_state = _whole_state(model) if isinstance(model, nn.Module) else contextlib.nullcontext()
    with whole_state, temporarily(inside, whole=True):
        result = real(model, *args, **kwargs)
    if isinstance(model, nn.Module) and isinstance(result, torch.jit.ScriptModule) and result is not model:
        _made_from[result] = weakref.ref(model)
    return result


@contextlib.contextmanager
def _whole_state(model: nn.Module, differentiable: bool = False) -> Iterator[None]:
    """A context in which a model's sharded parameters and buffers are whole. Collective if there are any.

    differentiable: whether gradients of the whole parameters reach the sharded ones.
    """
    found: dict[Tensor, Tensor] = {}
    sharded: list[tuple[dict[str, Any], str, DTensor]] = []
    modules = [x for x in modules_of(model) if not isinstance(x, torch.jit.ScriptModule)]
    dicts: list[dict[str, Any]] = [*map(PARAMETERS, modules), *map(BUFFERS, modules)]
    if {*map(type, chain.from_iterable(map(VALUES, dicts)))} <= _PLAIN:  # soonest: a model has hundreds of modules
        dicts = []
    for own in dicts:
        sharded += [
            (own, name, x)
            for name, x in zip(own, map(current, own.values()), strict=True)
            if isinstance(x, DTensor) and is_ours(x.device_mesh)
        ]
    for own, name, x in sharded:
        if x not in found:
            found[x] = _whole_parameter(x, differentiable)
        own[name] = found[x]
    try:
        yield
    finally:
        for own, name, x in sharded:
            own[name] = x


def _whole_parameter(x: DTensor, differentiable: bool) -> Tensor:
    is_active = torch._C._are_functorch_transforms_active()
    outside_of_transforms = temporarily_clear_interpreter_stack() if is_active else contextlib.nullcontext()
    with _disable_current_modes(), outside_of_transforms:  # a fake tensor mode could not gather, nor a transform
        if differentiable and x.requires_grad and torch.is_grad_enabled():
            return gather(x)
        own = whole(x.detach())  # type: ignore[arg-type]
    return nn.Parameter(own, x.requires_grad) if isinstance(x, nn.Parameter) else own


def _run_whole(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Calls a model in a forked process. RuntimeError, one line, where it has sharded parameters."""
    for x in (*module.parameters(), *module.buffers()):
        if isinstance(x, DTensor) and is_ours(x.device_mesh):
            whole_group(x.device_mesh)
    return module._call_impl(*args, **kwargs)


def _in_child() -> None:
    if end_in_child():
        forget_all()
        forget_plans()
        hooks.model_calls.insert(0, _run_whole)


@functools.cache
def run_whole_in_forked_processes() -> None:
    """From now on models run whole in processes that this one forks."""
    os.register_at_fork(after_in_child=_in_child)
