"""Plain tensors beside DTensors: distconv's treat them as replicated, a program's own as the program wants.

Operators get them without their subclass, and hooks are called. torch has one switch for replication, which belongs to
a thread and applies to all DTensors; C++ reads it for operators without a rule. Once a thread uses distconv, its switch
stays on. The program's own setting is kept here, and applies while an operator runs on the program's own DTensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.tensors import hooks
from distconv.tensors.deferred import Deferred
from distconv.tensors.mesh import is_ours
from distconv.tensors.refusal import UnsupportedOperation
from distconv.tensors.replacements import replace, until_put_back, when_put_back


def plain(x: Tensor) -> Tensor:
    """The same tensor without its subclass, where that only adds data and methods, as MONAI's MetaTensor and
    torchvision's images and masks do. DTensors, parameters and tensors with a dispatch of their own stay. What oneDNN
    has laid out gets an ordinary layout.
    """
    kind = type(x)
    if kind is Tensor or kind is DTensor or kind is nn.Parameter:
        return x.to_dense() if kind is Tensor and x.is_mkldnn else x
    if isinstance(x, nn.Parameter) or getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__:
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(Tensor)


def entering(func: Any, args: Sequence[Any], mesh: DeviceMesh) -> Sequence[Any]:
    """The arguments of an operator on DTensors of a mesh; plain ones without their subclass, and shown to hooks.

    Raises:
        UnsupportedOperation: for a DTensor of the program's own beside them.
    """
    for arg in args:
        if isinstance(arg, Tensor):
            if type(arg) is not DTensor:
                return _entered(func, args, mesh)
            if arg._spec.mesh is not mesh:
                _check_mesh(func, arg._spec.mesh)
        elif type(arg) is list and any(isinstance(item, Tensor) and type(item) is not DTensor for item in arg):
            return _entered(func, args, mesh)
    return args


def _check_mesh(func: Any, other: DeviceMesh) -> None:
    if not is_ours(other):
        raise UnsupportedOperation(
            f"{func}: a DTensor on {other}, a mesh of the program's own, beside one of distconv's;"
            " accepted: DTensors of one of them, or plain tensors, as to_local() and full_tensor() give"
        )


def _entered(func: Any, args: Sequence[Any], mesh: DeviceMesh) -> Sequence[Any]:
    name = func._schema.name
    if name.startswith(("aten::_foreach", "aten::_fused")):  # optimizers', of what was looked at before
        return args
    # Backward sees what forward has seen. What an operator changes in place stays on its rank.
    shown = torch._C._current_graph_task_id() == -1
    first = int(name.endswith("_"))

    def enter(index: int, x: Any) -> Any:
        if isinstance(x, DTensor):
            if x._spec.mesh is not mesh:
                _check_mesh(func, x._spec.mesh)
            return x
        if not isinstance(x, Tensor):
            return x
        if x.requires_grad and torch.is_grad_enabled():
            for notify in hooks.differentiated_operands:
                notify(x)
        x = plain(x)
        dense = x.layout == torch.strided
        if shown and dense and index >= first and x.dim() and type(x) in (Tensor, nn.Parameter, Deferred):
            for each in x.operands() if isinstance(x, Deferred) else (x,):
                for watch in hooks.plain_operands:
                    watch(func, index, each, mesh)
        return x

    return [
        [enter(index, item) for item in arg] if type(arg) is list else enter(index, arg)
        for index, arg in enumerate(args)
    ]


class _Thread(threading.local):
    ours = False  # Whether the switch is kept on for distconv.
    program = False
    """The value that the program has set, as with `torch.distributed.tensor.experimental.implicit_replication`."""


_thread = _Thread()


def mix_plain_tensors() -> None:
    """Makes a plain tensor beside one of distconv's DTensors count as replicated, in this thread from now on."""
    if not _thread.ours:
        dispatcher = DTensor._op_dispatcher
        _keep_what_the_program_sets()
        _thread.program, _thread.ours = dispatcher._allow_implicit_replication, True
        _switch.fset(dispatcher, True)
        when_put_back(as_before)


def as_before() -> None:
    """The switch of this thread is what the program has set."""
    if _thread.ours:
        _thread.ours = False
        _switch.fset(DTensor._op_dispatcher, _thread.program)


_switch: Any = type(DTensor._op_dispatcher).__dict__["_allow_implicit_replication"]  # torch's own property.


@until_put_back
def _keep_what_the_program_sets() -> None:
    def keep(dispatcher: Any, value: bool) -> None:
        _thread.program = value
        if not _thread.ours:
            _switch.fset(dispatcher, value)

    replace(type(DTensor._op_dispatcher), "_allow_implicit_replication", property(_switch.fget, keep))


@contextlib.contextmanager
def as_the_program_set() -> Iterator[None]:
    """A context in which torch's switch is what it would be without distconv."""
    if not _thread.ours or _thread.program:
        yield
        return
    dispatcher = DTensor._op_dispatcher
    _switch.fset(dispatcher, False)
    try:
        yield
    finally:
        _switch.fset(dispatcher, True)
