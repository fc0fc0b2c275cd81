"""Settings of Python and torch that belong to a thread, so that a part computes with those of the caller's thread."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

T = TypeVar("T")


@dataclass(frozen=True)
class Surroundings:
    """The settings of the caller's thread at the moment of a call."""

    grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype, bool], ...]
    """(device type, enabled, dtype, whether casts are kept) of each kind of device."""
    device: torch.device  # The device of new tensors that name none.
    stream: Any  # The CUDA stream; None without one.
    modes: tuple[Any, ...]  # The modes that see operators, such as a count of them, from the outermost on.
    variables: contextvars.Context  # The values of the context variables of Python.

    @classmethod
    def now(cls, device_type: str) -> Surroundings:
        """The surroundings of this thread."""
        cached = torch.is_autocast_cache_enabled()
        kinds = dict.fromkeys(("cpu", device_type))
        return cls(
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), cached) for kind in kinds),
            torch.get_default_device(),
            torch.cuda.current_stream() if device_type == "cuda" else None,
            tuple(_get_current_dispatch_mode_stack()),
            contextvars.copy_context(),
        )

    def run(self, work: Callable[[], T]) -> T:
        """Runs a function in this thread in these surroundings; a backward that it calls runs here, too."""
        return self.variables.copy().run(self._within, work)

    def _within(self, work: Callable[[], T]) -> T:
        with contextlib.ExitStack() as around:
            around.enter_context(torch.inference_mode(self.inference))
            # After the inference mode, which sets this switch, too. Else a backward of a GPU's tensors would wait for
            # autograd's thread of that GPU, which waits for the parts.
            around.enter_context(torch.autograd.set_multithreading_enabled(False))
            around.enter_context(torch.set_grad_enabled(self.grad))
            for kind, enabled, dtype, cached in self.autocast:
                around.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=cached))
            if self.device.type != "cpu":
                around.enter_context(self.device)
            if self.stream is not None:
                around.enter_context(torch.cuda.device(self.stream.device))
                around.enter_context(torch.cuda.stream(self.stream))
            for mode in self.modes:
                around.enter_context(mode)
            return work()
