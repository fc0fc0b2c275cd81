"""The shim: mucudnn's kernels of `aten::convolution` and `aten::convolution_backward` in torch's dispatcher."""

from __future__ import annotations

import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import Direction
from mucudnn.devices import SERVED, Device, Host
from mucudnn.private_names import GPUS, UNPATCHED, reason_off, require_feature
from mucudnn.process import renewed, substituted, switching_never, warn
from mucudnn.providers import is_torchs_own, stock_kernel
from mucudnn.runtime.decision import is_local_work, marking
from mucudnn.runtime.gradients import Gradients, in_memory_format
from mucudnn.runtime.session import UNDECIDED, Session

_WAIT = threading.Condition.wait.__code__
_lock = renewed(threading.Lock())
_library: torch.library.Library | None = None
_session: Session | None = None
_watching = ExitStack()
"""Ends the watch over steps of optimizers, and over changes between training and evaluation."""


def install(session: Session | None) -> Session | None:
    """Makes `session` serve this process's convolutions; None takes the shim out and leaves torch as it was.

    Returns:
        The session that served before.
    """
    global _session
    if session is None and _library is not None:
        require_feature(UNPATCHED)
    with _lock:
        before, _session = _session, session
        _set_marking()
        if before is None and session is not None and not reason_off(UNPATCHED):
            _watching.callback(register_optimizer_step_post_hook(_after_step).remove)
            _watching.enter_context(substituted(torch.nn.Module, train=_watched(torch.nn.Module.train)))
        elif session is None:
            _watching.close()
        _put()
        return before


def _set_marking() -> None:
    marking.clear()
    if _session is not None:
        marking.update(filter(_session.marks_local_work, map(str.lower, SERVED)))


def _put() -> None:
    """Registers the kernels, or takes them out, by the present state of the session."""
    global _library
    is_wanted = _session is not None and not _session.absence.is_out
    if is_wanted and _library is None:
        _library = _register()
    elif not is_wanted and _library is not None:
        _library._destroy()
        _library = None


def _after_step(*_: Any) -> None:
    """A step of an optimizer: the kernels may be taken out for the next ones."""
    if not torch.compiler.is_compiling() and _session is not None:
        with _lock, switching_never():
            _session.absence.step(_is_alone)
            _put()


def _watched(train: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.nn.Module.train`; where it changes the mode, other shapes may follow, so the kernels are put back."""

    @functools.wraps(train)
    def watched(self: torch.nn.Module, mode: bool = True) -> Any:
        changes = not torch.compiler.is_compiling() and mode != self.training
        if changes and _session is not None and _session.absence.is_out:
            with _lock, switching_never():
                _session.absence.end(_is_alone)
                _put()
        return train(self, mode)

    return watched


def _is_alone() -> bool:
    """Whether no other thread can be where torch looks for a kernel, which it does without a lock.

    Every other thread of Python must be in a wait of `threading`. GPUs have threads of their own for backward. Under
    deterministic algorithms each call of a shape computes the same.
    """
    here = get_ident()
    others = (frame for thread, frame in sys._current_frames().items() if thread != here)
    if torch.cuda.is_initialized() or torch.are_deterministic_algorithms_enabled():
        return False
    return getattr(sys, "_is_gil_enabled", lambda: True)() and all(frame.f_code is _WAIT for frame in others)


def _after_fork() -> None:
    """In a process that a rank has forked, torch computes all convolutions: the board is for the job's ranks alone."""
    global _session
    if _session is not None and _session.has_board:
        _session = None
        _set_marking()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def current_session() -> Session | None:
    """The session that serves this process's convolutions."""
    return _session


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for key, device in SERVED.items():
        if device is not Host and (line := reason_off(GPUS)):
            warn(f"torch computes convolutions on GPUs: {line}")
            continue
        # Taken before the registration: afterwards these names mean the shim.
        forward = stock_kernel("convolution", key)
        backward = stock_kernel("convolution_backward", key)
        if device is Host and is_torchs_own("convolution", key):
            forward = _unboxed
        kernels = {
            "convolution": _convolution(forward, device),
            "convolution_backward": _convolution_backward(backward, device),
        }
        with warnings.catch_warnings():
            # Torch warns that its own kernel under CUDA's key is replaced, which is intended.
            warnings.filterwarnings("ignore", r"(?s).*Overriding a previously registered kernel", UserWarning)
            for name, kernel in kernels.items():
                library.impl(name, kernel, key, allow_override=True)
    return library


def _unboxed(*arguments: Any) -> torch.Tensor:
    """The result of torch's own kernel of `aten::convolution` on the host, without boxing its arguments, for speed."""
    flags: Any = False, False, False, False  # they concern cuDNN alone
    with torch._C.DisableTorchFunction():
        return torch._convolution(*arguments, *flags)


def _convolution(stock: Callable[..., Any], device: type[Device]) -> Any:
    """The kernel of `aten::convolution` above torch's own."""
    forward, switches, on_host = Direction.FORWARD, device.switches, device is Host

    def convolution(
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> torch.Tensor:
        session = _session
        if session is not None:
            session.absence.threads.add(get_ident())
            geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
            devices = None if on_host else (input.get_device(), weight.get_device())
            looks = (
                devices, input.shape, input.stride(), input.dtype, weight.shape, weight.stride(), weight.dtype,
                geometry, switches(),
                session.is_by_work and is_local_work(),
            )  # fmt: skip
            key = forward, looks
            decision = _decision(session, key, input)
            if decision is not None:
                result = session.result(decision, key, Call(forward, input, weight, bias, None, *geometry))
                if result is not None:
                    return result
        by_torch: torch.Tensor = stock(
            input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
        return by_torch

    return convolution


def _convolution_backward(stock: Callable[..., Any], device: type[Device]) -> Any:
    """The kernel of `aten::convolution_backward` above torch's own."""
    backward_data, backward_filter, switches = Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER, device.switches
    on_host = device is Host

    def convolution_backward(
        grad_output: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias_sizes: Sequence[int] | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
        output_mask: Sequence[bool],
    ) -> Sequence[torch.Tensor | None]:
        session = _session
        if session is not None:
            session.absence.threads.add(get_ident())
            geometry = (tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding), groups)
            devices = None if on_host else (grad_output.get_device(), input.get_device(), weight.get_device())
            looks = (
                devices, grad_output.shape, grad_output.stride(), grad_output.dtype, input.shape, input.stride(),
                input.dtype, weight.shape, weight.stride(), weight.dtype, geometry, switches(),
                session.is_by_work and is_local_work(),
            )  # fmt: skip
            wants_data, wants_filter, _ = output_mask
            data = _decision(session, (backward_data, looks), input) if wants_data else None
            filter = _decision(session, (backward_filter, looks), input) if wants_filter else None
            if data is not None or filter is not None:
                if not (on_host or grad_output.is_contiguous()):
                    grad_output = in_memory_format(grad_output, input)
                arguments = grad_output, input, weight, bias_sizes, *geometry
                gradients = Gradients(stock, arguments, output_mask)
                return gradients.found(session, data, filter, looks)
        every: Sequence[torch.Tensor | None] = stock(
            grad_output, input, weight, bias_sizes, stride, padding, dilation,
            transposed, output_padding, groups, output_mask,
        )  # fmt: skip
        return every

    return convolution_backward


def _decision(session: Session, key: tuple[Any, ...], input: torch.Tensor) -> Any:
    """The decision for a key, `UNDECIDED` if it is to be made now; `None` where torch computes the call."""
    decision = session.decisions.get(key, UNDECIDED)
    if decision is UNDECIDED:
        session.absence.is_busy = True
        return None if session.awaits(key, input.device) else decision
    if decision is not None and decision.rest > 0:
        decision.rest -= 1
        return None
    return decision
