"""Finds out what a script computes: the first call of its model is recorded, and ends the script."""

from __future__ import annotations

import contextlib
import os
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from distconv.files.job_folder import job_folder
from distconv.files.private import files_of_rank

PATIENCE = 10.0  # Seconds after the first call of a model in inference in which one in training may still follow.


class NoModel(ValueError):
    """A script that does not call a model as is needed: one line."""


class _Seen(BaseException):
    """Enough has been seen; not an `Exception`, which a script may catch."""


@dataclass(frozen=True)
class ModelCall:
    """A call of a model."""

    model: nn.Module  # The model that is called, by no other module.
    shapes: tuple[tuple[int, ...], ...]  # The shapes of its whole inputs.
    trains: bool  # Whether a backward pass follows; else it is inference.


class _Watch:
    """The calls of models that a script makes."""

    def __init__(self) -> None:
        self.training: tuple[nn.Module, tuple[Any, ...]] | None = None
        self.inference: tuple[nn.Module, tuple[Any, ...]] | None = None
        self._depth, self._since = 0, 0.0

    def enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Notes the first call in training, and the first one in inference that can be planned; ends the script."""
        self._depth += 1
        if torch.is_grad_enabled() and module.training and any(p.requires_grad for p in module.parameters()):
            self.training = module, inputs
            raise _Seen
        if self.inference is not None and time.monotonic() - self._since > PATIENCE:
            raise _Seen
        if self.inference is None and self._depth == 1 and _shapes(inputs) and any(True for _ in module.parameters()):
            self.inference, self._since = (module, inputs), time.monotonic()

    def leave(self, *_: Any) -> None:
        self._depth -= 1


def first_call(run: Callable[[], object]) -> ModelCall:
    """Runs a script up to its first call of a model in training; files that it writes are its own, and are removed.

    Where a script only calls models in inference, it is the first such call whose inputs are tensors of numbers: the
    script has ended by itself, or `PATIENCE` later.

    ``run``: the script.

    Raises:
        NoModel: where the script ends or fails before, or the model takes anything but tensors of numbers.
    """
    watch, failed = _Watch(), ""
    hooks = (register_module_forward_pre_hook(watch.enter), register_module_forward_hook(watch.leave, always_call=True))
    try:
        with (
            job_folder() as folder,
            files_of_rank(folder, 1),
            open(os.devnull, "w") as quiet,
            contextlib.redirect_stdout(quiet),
        ):
            run()
    except (_Seen, SystemExit):
        pass
    except Exception as error:
        line = traceback.extract_tb(error.__traceback__)[-1]
        why = (str(error).splitlines() or [""])[0]
        failed = f" with {type(error).__name__}: {why} ({line.filename}:{line.lineno})"
    finally:
        for hook in hooks:
            hook.remove()
    if failed or not (found := watch.training or watch.inference):
        raise NoModel(f"the script ends before it calls a model{failed}")
    model, given = found
    if shapes := _shapes(given):
        return ModelCall(model, shapes, trains=watch.training is not None)
    name, values = type(model).__name__, ", ".join(map(_word, given)) or "nothing"
    raise NoModel(f"{name} is called with {values}; accepted: tensors of numbers, one of them (N, C, ...)")


def _shapes(given: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
    """The shapes of a call's inputs; none where it cannot be planned."""
    tensors = [x for x in given if isinstance(x, Tensor) and x.ndim and x.is_floating_point()]
    if len(tensors) != len(given) or not any(x.ndim >= 3 for x in tensors):
        return ()
    return tuple(tuple(x.shape) for x in tensors)


def _word(given: object) -> str:
    return f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
