"""What a script trains: seen at the first call of its model, at which the script ends."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from distconv.job.files.private import files_of_rank, job_folder


class NoModel(ValueError):
    """A script that does not call a model as is needed: one line."""


class _Called(BaseException):
    """A model is called; not an `Exception`, which a script may catch."""

    def __init__(self, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        super().__init__()
        self.model, self.inputs = model, inputs


def first_call(run: Callable[[], object]) -> tuple[nn.Module, tuple[tuple[int, ...], ...]]:
    """Runs a script up to its first call of a model in training; files that it writes are its own, and are removed.

    Args:
        run: the script.

    Returns:
        The model, and the shapes of its whole inputs.

    Raises:
        NoModel: where the script ends before, or the model takes anything but tensors of numbers.
    """

    def called(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        trains = torch.is_grad_enabled() and module.training
        if trains and any(parameter.requires_grad for parameter in module.parameters()):
            raise _Called(module, inputs)

    hook = register_module_forward_pre_hook(called)
    try:
        with (
            job_folder() as folder,
            files_of_rank(folder, 1),
            open(os.devnull, "w") as quiet,
            contextlib.redirect_stdout(quiet),
        ):
            run()
    except _Called as found:
        given = found.inputs
        tensors = [x for x in given if isinstance(x, Tensor) and x.ndim and x.is_floating_point()]
        if len(tensors) == len(given) and any(x.ndim >= 3 for x in tensors):
            return found.model, tuple(tuple(x.shape) for x in tensors)
        name, told = type(found.model).__name__, ", ".join(map(_word, given)) or "nothing"
        raise NoModel(f"{name} is called with {told}; accepted: tensors of numbers, one of them (N, C, ...)") from None
    except SystemExit:
        pass
    finally:
        hook.remove()
    raise NoModel("the script ends before it calls a model in training")


def _word(given: object) -> str:
    return f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
