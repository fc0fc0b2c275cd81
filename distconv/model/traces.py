"""What torch.compile traces in a program on ranks: whole models, and functions of the program that call models.

A whole model becomes one graph (`distconv.model.compiled`). The graph of a function of the program ends where it calls
a model, so a function that has to be one graph, or that Dynamo cannot trace with distributed tensors, runs without a
compiler, after one warning. In the place of a function that `torch.jit.script` or `torch.cond` compiles, the Python
function runs. TorchScript calls operators beneath Python, where the rules of distributed tensors are not reached, and
`torch.cond` compiles the functions that it chooses from to an operator that knows no such tensors.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from distconv.model.direct.paths import temporarily
from distconv.private_names import SCRIPTED, SCRIPTED_CALLS, lacks
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import in_place_of, replace, until_put_back
from distconv.tensors.user_lines import asked_for
from mucudnn.lazily import uncollected
from mucudnn.process import substituted, warn

_PACKAGES = tuple(str(Path(__file__).resolve().parents[2] / name) + os.sep for name in ("distconv", "mucudnn"))


class _Compiling(threading.local):
    is_tracing = False  # Whether torch.compile traces a whole model in this thread.

    meshes: Callable[[], Mapping[Tensor, DeviceMesh]] | None = None
    """Gives the meshes of the parameters of the compiled model that runs. Called where a graph is made."""


compiling = _Compiling()


def is_tracing_model() -> bool:
    """Whether this thread traces a whole model, and not a function of the program that calls one."""
    return compiling.is_tracing


@contextlib.contextmanager
def tracing(meshes: Callable[[], Mapping[Tensor, DeviceMesh]] | None = None) -> Iterator[None]:
    """A context in which torch.compile traces a whole model: the modules in it are called as they are.

    Where a module has no hooks, Dynamo calls ``forward`` in place of the ``nn.Module.__call__`` that it knows. Any
    other ``__call__`` it traces step by step: that takes longer, and makes more guards to check at every call.
    """
    with temporarily(compiling, meshes=meshes, is_tracing=True):
        yield


@until_put_back
def watch_traces() -> None:
    """Makes Dynamo treat distconv's ``nn.Module.__call__`` as torch's own while it traces a whole model (`tracing`).

    Dynamo traces in one thread at a time, so no other thread sees the replacement. Where it traces functions of the
    program, it leaves distconv's own functions alone, with all that these call: backward of a model calls them if such
    a function has ``loss.backward()``, and their collectives cannot be traced.
    """
    with uncollected():
        from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy
        from torch._dynamo import compiled_autograd, convert_frame, types
        from torch._dynamo.variables import nn_module

    torch.compiler.assume_constant_result(is_tracing_model)
    stock = convert_frame.CatchErrorsWrapper.__call__
    failed: weakref.WeakSet[CodeType] = weakref.WeakSet()

    def left(apply_to_code: bool) -> Any:
        skipped = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)
        return types.ConvertFrameReturn(frame_exec_strategy=skipped, apply_to_code=apply_to_code)

    def traced(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
        if compiling.is_tracing:
            with convert_frame.compile_lock, substituted(nn_module, unpatched_nn_module_call=nn.Module.__call__):
                return stock(self, frame, *args, **kwargs)
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGES) and code is not nn.Module.__call__.__code__:
            return left(apply_to_code=True)
        if code not in failed:
            try:
                return stock(self, frame, *args, **kwargs)
            except Exception as error:  # of any kind, since a backend is any function
                failed.add(code)
                left_uncompiled(code.co_name, error)
        _count_as_compiled()
        return left(apply_to_code=False)  # so that each call comes here, and counts

    replace(convert_frame.CatchErrorsWrapper, "__call__", traced)
    replace(compiled_autograd, "_enable", _uncompiled_autograd)


def _uncompiled_autograd(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    """Takes the place of the context in which torch traces each backward as a whole, through functions of distconv."""
    warn(f"torch._dynamo.config.compiled_autograd {asked_for()}: backward runs without it on ranks", "distconv")
    return contextlib.nullcontext()


def _count_as_compiled() -> None:
    """Lets a function run that has ``fullgraph=True``: torch refuses one of which no graph was made."""
    from torch._C._dynamo import eval_frame

    count = getattr(eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is not None:
        before = count(-1)
        count(before if before < 0 else before + 1)


CALLS_MODEL = "it calls a model of the job; accepted: compile the model, and such a function without fullgraph=True"


def left_uncompiled(name: str, reason: str | Exception) -> None:
    """Warns that a model or a function runs without its compiler, and why."""
    if isinstance(reason, Exception):
        of_backend = str(getattr(reason, "inner_exception", reason)).strip()
        reason = CALLS_MODEL if "module: distconv." in of_backend else of_backend.partition("\n")[0]
    warn(f"torch.compile: {name} {asked_for()} runs without it: {reason}", "distconv")


@until_put_back
def call_scripted_functions_in_python() -> None:
    """Makes scripted functions run as the Python functions they were made of where they get distributed tensors.

    `torch.cond` calls one of its functions: all ranks have the same condition, so they call the same one.
    """
    replace(torch, "cond", in_place_of(torch.cond, _cond))
    if not lacks(SCRIPTED_CALLS):
        replace(torch.jit.ScriptFunction, "__call__", in_place_of(torch.jit.ScriptFunction.__call__, _in_python))


def known_to_script(made: Callable[..., Any], stock: Callable[..., Any]) -> Callable[..., Any]:
    """What takes the place of one of torch's functions; scripted functions, which know these as objects, accept it."""
    operator = None if lacks(SCRIPTED) else torch.jit._builtins._find_builtin(stock)
    if operator is not None:
        torch.jit._builtins._register_builtin(made, operator)
    return made


def _in_python(real: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    if not any(isinstance(x, DTensor) and is_ours(x.device_mesh) for x in tree_leaves((args, kwargs))):
        return real(function, *args, **kwargs)
    original = getattr(function, "_torchdynamo_inline", None)
    if original is None:
        raise UnsupportedOperation(
            f"{function.name}, a function of torch.jit without a Python function: called with a distributed tensor;"
            " accepted: the functions that torch.jit.script and torch.jit.trace give"
        )
    return original(*args, **kwargs)


def _cond(
    stock: Callable[..., Any],
    pred: Any,
    true_fn: Callable[..., Any],
    false_fn: Callable[..., Any],
    operands: Sequence[Any] = (),
) -> Any:
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return stock(pred, true_fn, false_fn, operands)
    return (true_fn if pred else false_fn)(*operands)
