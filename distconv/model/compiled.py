"""torch.compile of a distributed model: one graph each for forward and backward, of local operators and collectives.

The outermost call stays eager: it redistributes the inputs to the mesh. torch.compile traces forward of the plain
model, with DTensors as inputs and plain parameters. In the traced graph each parameter first goes through the functions
that also take it through an eager pass (see distconv.model.gradients). Then the graph is handed to the backend. There
the rules run with tensors that have no values, and the graph keeps what they do to local tensors.

A model that torch.compile cannot take into one graph runs without it, after one warning: where a graph breaks in the
middle of a model, parameters would be read outside of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from distconv.model.graph_entrance import enter_parameters
from distconv.model.graph_outputs import differentiable_apart
from distconv.model.graph_statistics import move_statistics_last
from distconv.tensors.mesh import whole_group
from distconv.tensors.replacements import replace, until_put_back
from distconv.tensors.user_lines import asked_for
from distconv.transfer.graph_merges import merging
from mucudnn.lazily import uncollected
from mucudnn.process.substitution import substituted
from mucudnn.process.warning import warn


class NotCompiled(Exception):
    """Nothing has run yet: the model is to run without a compiler."""


class _Thread(threading.local):
    is_tracing = False  # Whether what torch.compile traces in this thread is a whole model.

    meshes: Callable[[], Mapping[Tensor, DeviceMesh]] | None = None
    """The meshes of the parameters of the compiled model that runs: asked where a graph is made, not at each call."""


_thread = _Thread()

_FORMS = "_distconv_forms"


def is_tracing_model() -> bool:
    """Whether what this thread traces is a whole model, and no function of the program that calls one."""
    return _thread.is_tracing


@until_put_back
def watch_traces() -> None:
    """Dynamo learns of ``nn.Module.__call__`` while that is torch's own, and of distconv's only in `tracing`.

    It traces in one thread at a time, so that no other one finds what is replaced meanwhile.
    """
    with uncollected():
        from torch._dynamo import convert_frame
        from torch._dynamo.variables import nn_module

    torch.compiler.assume_constant_result(is_tracing_model)
    stock = convert_frame.CatchErrorsWrapper.__call__

    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _thread.is_tracing:
            return stock(self, *args, **kwargs)
        with convert_frame.compile_lock, substituted(nn_module, unpatched_nn_module_call=nn.Module.__call__):
            return stock(self, *args, **kwargs)

    replace(convert_frame.CatchErrorsWrapper, "__call__", traced)


def original(module: nn.Module) -> nn.Module:
    """The module itself, or the one in it where it is what ``torch.compile(module)`` returned."""
    own = module.__dict__
    inner: nn.Module = own["_modules"]["_orig_mod"] if "dynamo_ctx" in own else module
    return inner


def maker(module: nn.Module) -> Any:
    """What ``torch.compile(module)`` or ``module.compile()`` made for the program; None for any other module."""
    return module.__dict__.get("dynamo_ctx") or getattr(module, "_compiled_call_impl", None)


def run(
    module: nn.Module,
    made: Any,
    mesh: DeviceMesh,
    meshes: Callable[[], Mapping[Tensor, DeviceMesh]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Calls a module with the inputs of an outermost call, compiled. NotCompiled where it is to run without a compiler.

    Args:
        made: what ``maker`` returned.
        mesh: that of the inputs.
        meshes: gives the layout of each of its parameters.
    """
    forms: weakref.WeakKeyDictionary[nn.Module, _Form] = made.__dict__.setdefault(_FORMS, weakref.WeakKeyDictionary())
    if module not in forms:
        forms[module] = _Form(module, made)
    with tracing(meshes):
        return forms[module](mesh, args, kwargs)


@contextlib.contextmanager
def tracing(meshes: Callable[[], Mapping[Tensor, DeviceMesh]] | None = None) -> Iterator[None]:
    """A context in which torch.compile traces a whole model: the modules in it are called as they are.

    Dynamo knows an ``nn.Module.__call__`` in whose place it calls ``forward`` where a module has no hooks. Any other it
    traces step by step: that takes longer, and leaves a graph with more to check at every call of it.
    """
    outer = _thread.meshes, _thread.is_tracing
    _thread.meshes, _thread.is_tracing = meshes, True
    try:
        yield
    finally:
        _thread.meshes, _thread.is_tracing = outer


def _warn(module: nn.Module, reason: str) -> None:
    warn(f"torch.compile: {type(module).__name__} {asked_for()} runs without it: {reason}", "distconv")


_left: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # Compiled modules that were left without a compiler.

PART = "it is a part of a distributed model; accepted: the model as a whole"
MESHES = "it runs on several meshes; accepted: one partition, and inputs on its mesh"


def leave_uncompiled(module: nn.Module, reason: str) -> None:
    """A compiled module runs without a compiler, and why; printed once."""
    if module not in _left:
        _left.add(module)
        _warn(module, reason)


class _Question:
    """Whether all ranks could compile a model. Each asks when it knows of itself, until its first graph is there."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self._is_open = mesh, True

    def all(self, here: bool, last: bool = True) -> bool:
        """Collective over the mesh until the last time, or until a rank could not; later graphs are the same on all."""
        if not self._is_open or self.mesh.size() == 1:
            return here
        flag = torch.tensor(int(here), device=self.mesh.device_type)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=whole_group(self.mesh))
        answer = bool(flag.item())
        self._is_open = answer and not last
        return answer


class _Form:
    """A module as torch.compile is to compile it: its forward pass in one graph, for a backend of ours."""

    def __init__(self, module: nn.Module, made: Any) -> None:
        context = made if hasattr(made, "callback") else inspect.getclosurevars(made).nonlocals["self"]
        self._module = module
        self._fullgraph = bool(context.fullgraph)
        self._backend = _Backend(torch._dynamo.eval_frame.innermost_backend(context.callback))
        self._forward = torch.compile(_forward_of(module), backend=self._backend, fullgraph=True, dynamic=False)
        self._given_up = False
        self._everywhere: _Question | None = None

    def __call__(self, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._given_up:
            raise NotCompiled
        if self._everywhere is None:
            self._everywhere = self._backend.everywhere = _Question(mesh)
        try:
            return self._forward(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # as torch.compile does beyond its limit
            if self._fullgraph:
                raise
            reason: Exception = error
        except torch._dynamo.exc.TorchDynamoException as error:
            self._everywhere.all(False)
            if self._fullgraph or _lacks_compiler(error):
                raise
            self._given_up, reason = True, error
        _warn(self._module, _first_line(reason))
        raise NotCompiled


def _first_line(reason: Exception) -> str:
    inner = getattr(reason, "inner_exception", reason)  # what a backend has raised
    return str(inner).strip().partition("\n")[0]


def _lacks_compiler(error: BaseException | None) -> bool:
    """Whether a backend failed for want of a C++ compiler, which torch reports in one line."""
    while error is not None:
        if type(error).__name__ == "InvalidCxxCompiler" or "InvalidCxxCompiler" in str(error):
            return True
        error = error.__cause__
    return False


def _forward_of(module: nn.Module) -> Callable[..., Any]:
    call = nn.Module._call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():  # as under torch.compiler.set_stance("force_eager")
            raise NotCompiled
        return call(module, *args, **kwargs)

    # What torch.compile keeps, and the most that it keeps, is of a code object: each module has its own.
    forward.__code__ = forward.__code__.replace(co_name=f"forward of {type(module).__name__}")
    return forward


class _Backend:
    """The program's backend, given graphs in which parameters are distributed before they are read."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.everywhere: _Question | None = None
        if hasattr(self._backend, "backend_ctx_ctor"):
            self.backend_ctx_ctor = self._backend.backend_ctx_ctor

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        meshes = _thread.meshes
        if meshes is not None:
            if _has_checkpoint(graph):
                raise RuntimeError("torch.utils.checkpoint within a compiled model; accepted: without one of the two")
            move_statistics_last(graph, inputs)
            enter_parameters(graph, inputs, meshes())
        # Torch takes the gradients of inputs that a graph changes for plain zeros, unless it is kept from guessing.
        # They may be that where a view is changed, to which `differentiable_apart` gives none.
        is_apart = meshes is not None and not any(isinstance(x, Tensor) and x._is_view() for x in inputs)
        guesses = {"disable_guess_zero_tangent_for_mutated_input_subclass": True} if is_apart else {}
        with torch._functorch.config.patch(guesses):
            if self.everywhere is None:
                result = self._backend(graph, inputs)
            else:
                with merging(self.everywhere.mesh, functools.partial(self._agree, last=False)):
                    result = self._backend(graph, inputs)
                self._agree()
        return result if meshes is None else differentiable_apart(result)

    def _agree(self, last: bool = True) -> None:
        assert self.everywhere is not None
        if not self.everywhere.all(True, last):
            raise RuntimeError("another rank could not compile it")


def _has_checkpoint(graph: fx.GraphModule) -> bool:
    """Whether something is to be computed again in backward, where each rank's partitioner chooses what, and when.

    It chooses by the sizes of its own shards: ranks whose shards differ would call different collectives. On one rank
    torch takes a mesh that is saved for backward for a tensor.
    """
    parts = (part for part in graph.modules() if isinstance(part, fx.GraphModule))
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    return any(node.target is checkpoint for part in parts for node in part.graph.nodes)
