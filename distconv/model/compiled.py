"""torch.compile of a distributed model: one graph each for forward and backward, of local operators and collectives.

The outermost call stays eager: it redistributes the inputs to the mesh. torch.compile traces forward of the plain
model, with DTensors as inputs and plain parameters. In the traced graph each parameter first goes through the functions
that also take it through an eager pass (see distconv.model.gradients). Then the graph is handed to the backend. There
the rules run with tensors that have no values, and the graph keeps what they do to local tensors.

A model that torch.compile cannot take into one graph runs without it, after one warning: where a graph breaks in the
middle of a model, parameters would be read outside of it.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

from distconv.model.graph_entrance import enter_parameters
from distconv.model.graph_exit import differentiable_apart, move_statistics_last
from distconv.model.traces import compiling, left_uncompiled, tracing
from distconv.tensors.mesh import whole_group
from distconv.tensors.replacements import in_place_of
from distconv.transfer.graph_merges import merging


class NotCompiled(Exception):
    """The model is to run without a compiler; none of it has run yet."""


_COMPILED = "_distconv_compiled"


def original(module: nn.Module) -> nn.Module:
    """The module, or the one in it where the module was returned by ``torch.compile``. TypeError, one line, for what is
    no module, such as a class or a function."""
    if not isinstance(module, nn.Module):
        what = f"the class {module.__name__}" if isinstance(module, type) else f"of type {type(module).__name__}"
        raise TypeError(f"model: {what}; accepted: a torch.nn.Module")
    own = module.__dict__
    inner: nn.Module = own["_modules"]["_orig_mod"] if "dynamo_ctx" in own else module
    return inner


def compiled_call(module: nn.Module) -> Any:
    """The object by which ``torch.compile(module)`` or ``module.compile()`` calls a module; None for other modules."""
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
        made: the result of ``compiled_call``.
        mesh: the mesh of the inputs.
        meshes: gives the mesh of each parameter.
    """
    compiled: weakref.WeakKeyDictionary[nn.Module, _CompiledModule]
    compiled = made.__dict__.setdefault(_COMPILED, weakref.WeakKeyDictionary())
    if module not in compiled:
        compiled[module] = _CompiledModule(module, made)
    with tracing(meshes):
        return compiled[module](mesh, args, kwargs)


_uncompiled: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # Modules that run without their compiler.

PART = "it is a part of a distributed model; accepted: the model as a whole"
MESHES = "it runs on several meshes; accepted: one partition, and inputs on its mesh"


def leave_uncompiled(module: nn.Module, reason: str) -> None:
    """Warns, once for a module, that it runs without its compiler, and why."""
    if module not in _uncompiled:
        _uncompiled.add(module)
        left_uncompiled(type(module).__name__, reason)


class _CompilingRanks:
    """Whether all ranks can compile a model. Each rank reports whether it can, until its first graph is complete."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self._is_open = mesh, True

    def all(self, here: bool, last: bool = True) -> bool:
        """Whether every rank can. Collective over the mesh, until ``last`` was given or a rank could not: ranks that
        have compiled one graph compile the same later ones."""
        if not self._is_open or self.mesh.size() == 1:
            return here
        flag = torch.tensor(int(here), device=self.mesh.device_type)
        dist.all_reduce(flag, dist.ReduceOp.MIN, group=whole_group(self.mesh))
        answer = bool(flag.item())
        self._is_open = answer and not last
        return answer


class _CompiledModule:
    """A module whose forward pass torch.compile compiles as one graph, with a backend of ours around the program's."""

    def __init__(self, module: nn.Module, made: Any) -> None:
        context = made if hasattr(made, "callback") else inspect.getclosurevars(made).nonlocals["self"]
        self._module = module
        self._fullgraph = bool(context.fullgraph)
        self._backend = _Backend(torch._dynamo.eval_frame.innermost_backend(context.callback))
        self._forward = torch.compile(_forward_of(module), backend=self._backend, fullgraph=True, dynamic=False)
        self._has_failed = False
        self._ranks: _CompilingRanks | None = None

    def __call__(self, mesh: DeviceMesh, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._has_failed:
            raise NotCompiled
        if self._ranks is None:
            self._ranks = self._backend.ranks = _CompilingRanks(mesh)
        try:
            return self._forward(*args, **kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:  # as torch.compile does beyond its limit
            if self._fullgraph:
                raise
            reason: Exception = error
        except torch._dynamo.exc.TorchDynamoException as error:
            self._ranks.all(False)
            if self._fullgraph or _lacks_compiler(error):
                raise
            self._has_failed, reason = True, error
        left_uncompiled(type(self._module).__name__, reason)
        raise NotCompiled


def _lacks_compiler(error: BaseException | None) -> bool:
    """Whether a backend failed because there is no C++ compiler, which torch reports in one line."""
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

    # torch.compile caches graphs by code object, up to a limit for each: every module gets a code object of its own.
    forward.__code__ = forward.__code__.replace(co_name=f"forward of {type(module).__name__}")
    return forward


class _Backend:
    """The program's backend, given graphs in which parameters are distributed before they are read."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.ranks: _CompilingRanks | None = None
        if hasattr(self._backend, "backend_ctx_ctor"):
            self.backend_ctx_ctor = self._backend.backend_ctx_ctor

    def __call__(self, graph: fx.GraphModule, inputs: list[Any]) -> Any:
        meshes = compiling.meshes
        if meshes is not None:
            if _has_checkpoint(graph):
                raise RuntimeError("torch.utils.checkpoint within a compiled model; accepted: without one of the two")
            move_statistics_last(graph, inputs)
            enter_parameters(graph, inputs, meshes())
        # Torch assumes plain zeros for the gradients of inputs that a graph changes in place. That is right only for
        # views, for which `differentiable_apart` makes no zeros.
        has_views = any(isinstance(x, Tensor) and x._is_view() for x in inputs)
        distributed_zeros = meshes is not None and not has_views
        options = {"disable_guess_zero_tangent_for_mutated_input_subclass": True} if distributed_zeros else {}
        with torch._functorch.config.patch(options):
            if self.ranks is None:
                result = self._backend(graph, inputs)
            else:
                with merging(self.ranks.mesh, functools.partial(self._agree, last=False)):
                    result = self._backend(graph, inputs)
                self._agree()
        return result if meshes is None else in_place_of(result, differentiable_apart)

    def _agree(self, last: bool = True) -> None:
        assert self.ranks is not None
        if not self.ranks.all(True, last):
            raise RuntimeError("another rank could not compile it")


def _has_checkpoint(graph: fx.GraphModule) -> bool:
    """Whether a graph has a part under `torch.utils.checkpoint`, which backward recomputes.

    On each rank torch's partitioner chooses what to recompute, by the sizes of that rank's shards: ranks whose shards
    differ would call different collectives. On one rank torch mistakes a mesh that is saved for backward for a tensor.
    """
    parts = (part for part in graph.modules() if isinstance(part, fx.GraphModule))
    checkpoint = torch.ops.higher_order.tag_activation_checkpoint
    return any(node.target is checkpoint for part in parts for node in part.graph.nodes)
