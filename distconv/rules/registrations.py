"""What distconv has registered with torch for operators on DTensors: it can be taken back, and put there again.

Torch asks for the rule of an operator by the class of its tensors, before it knows their meshes. So a rule of ours is
found for a program's own DTensors, too. It calls the operator once more, for which torch then finds none: its own
dispatch runs, as without distconv. Modes have seen the operator by then, and see only what this dispatch calls.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._library.simple_registry import singleton
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

from distconv.private_names import COMPILED, LAYERS, STRANGERS, lacks, require
from distconv.rules.schemas import operator
from distconv.tensors.plain_tensors import as_the_program_set

KEYS = ("AutogradCPU", "AutogradCUDA", "AutogradMeta")


class _Thread(threading.local):
    passed: str | None = None  # The operator for which torch is to find no rule the next time that it asks.
    without_modes: contextlib.ExitStack  # Left when it asks.


_thread = _Thread()


def by_torch(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """An operator on a program's own DTensors, by torch's own dispatch of them."""
    require(STRANGERS)
    with as_the_program_set(), contextlib.ExitStack() as without_modes:
        if _get_current_dispatch_mode_stack():
            without_modes.enter_context(_disable_current_modes())
        _thread.passed, _thread.without_modes = func.__qualname__, without_modes
        try:
            return func(*args, **kwargs)
        finally:
            _thread.passed = None


def _find(rules: Any, of_class: type) -> Any:
    if of_class is DTensor and _thread.passed == rules.qualname:
        _thread.passed = None
        _thread.without_modes.close()
        return None
    return type(rules).find(rules, of_class)


class Registrations:
    """The rules and kernels of operators, which torch knows while they are in place."""

    def __init__(self) -> None:
        self._rules: dict[str, Callable[..., Any]] = {}
        self._kernels: dict[str, Callable[..., Any]] = {}
        self._undo: list[Callable[[], object]] = []
        self._in_place = False

    def __contains__(self, name: str) -> bool:
        """Whether an operator has a rule."""
        return name in self._rules

    @property
    def names(self) -> set[str]:
        """The operators that have a rule."""
        return set(self._rules)

    def add_rule(self, name: str, dispatch: Callable[..., Any]) -> None:
        """``dispatch(cls, func, types, args, kwargs)`` for an operator on DTensors."""
        self._rules[name] = dispatch
        if self._in_place:
            self._register_rule(name)

    def add_kernel(self, name: str, kernel: Callable[..., Any]) -> None:
        """``kernel(as_before, keyset, *args, **kwargs)`` where autograd runs; `as_before(keyset, ...)` is torch's."""
        self._kernels[name] = kernel
        if self._in_place:
            self._register_kernel(name)

    def put_in_place(self) -> None:
        """From now on torch knows them all, and those that are added."""
        if not self._in_place:
            self._in_place = True
            for name in self._rules:
                self._register_rule(name)
            for name in self._kernels:
                self._register_kernel(name)

    def take_back(self) -> None:
        """Torch knows none of them any more."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        _torchs_own.clear()
        self._in_place = False

    def _register_rule(self, name: str) -> None:
        if lacks(STRANGERS):
            torch.library.register_torch_dispatch(name, DTensor, self._rules[name])
            return
        # As torch.library.register_torch_dispatch does, which for some operators keeps what it has registered.
        rules: Any = singleton.find(name).torch_dispatch_rules
        self._undo.append(rules.register(DTensor, self._rules[name]).destroy)
        rules.find = functools.partial(_find, rules)
        self._undo.append(lambda: vars(rules).pop("find"))

    def _register_kernel(self, name: str) -> None:
        library = torch.library.Library("aten", "IMPL")
        for key in KEYS:
            run = functools.partial(self._kernels[name], _as_before(name, key))
            library.impl(name.removeprefix("aten::"), run, key, with_keyset=True)
        self._undo += [functools.partial(_forget_dispatch, name), lambda: library._destroy()]
        _forget_dispatch(name)


_torchs_own: dict[tuple[str, str], torch._C.DispatchKeySet] = {}
"""By operator and key: the key, where torch's own kernel is behind ours, and at the key of other devices, too."""


def past_kernel(name: str, x: Tensor, function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function that calls an operator on plain tensors, on the device of x: without our kernel, which
    is one of Python, where torch's own is behind it."""
    key = "AutogradCPU" if x.is_cpu else "AutogradCUDA" if x.is_cuda else ""
    found = _torchs_own.get((name, key)) if type(x) is Tensor and not _get_current_dispatch_mode_stack() else None
    if found is None:
        return function(*args)
    with torch._C._ExcludeDispatchKeyGuard(found), torch._C._IncludeDispatchKeyGuard(_OTHERS):
        return function(*args)


_OTHERS = torch._C.DispatchKey.AutogradOther


def _as_before(name: str, key: str) -> Callable[..., Any]:
    """``call(keyset, *args, **kwargs)`` of the kernel at a key before ours, while which other threads of Python run.

    Torch's own is at the key of other devices, too, by which the dispatcher calls it. One that another library has
    put before torch's is called itself, which keeps Python's lock.
    """
    kernel = torch.library.get_kernel(name, key)
    if repr(kernel) != repr(torch.library.get_kernel(name, "AutogradOther")):
        return kernel.call_boxed
    own = getattr(torch._C.DispatchKey, key)
    if not lacks(LAYERS):
        _torchs_own[name, key] = torch._C.DispatchKeySet(own)
    redispatch = operator(name.removeprefix("aten::")).redispatch

    elsewhere: dict[int, Any] = {}
    python = torch._C.DispatchKey.Python

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        number = keyset.raw_repr()
        if number not in elsewhere:
            elsewhere[number] = None if keyset.has(python) else keyset.remove(own).add(_OTHERS)
        keys = elsewhere[number]
        # Of a subclass, or beneath a mode, Python computes; torch's dispatcher for graphs would call itself for ever.
        return kernel.call_boxed(keyset, *args, **kwargs) if keys is None else redispatch(keys, *args, **kwargs)

    return call


def _forget_dispatch(name: str) -> None:
    """What torch.compile has traced before has made torch remember the kernel that ran then."""
    for key in () if lacks(COMPILED) else KEYS:
        operator(name.removeprefix("aten::"))._uncache_dispatch(getattr(torch._C.DispatchKey, key))


registrations = Registrations()
