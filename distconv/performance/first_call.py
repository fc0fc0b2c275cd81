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


def first_call(run: Callable[[], object]) -> tuple[nn.Module, tuple[int, ...]]:
    """Runs a script up to its first call of a model in training; files that it writes are its own, and are removed.

    Args:
        run: the script.

    Returns:
        The model, and the shape of its whole input.

    Raises:
        NoModel: where the script ends before, or the model's input is not one tensor.
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
        match found.inputs:
            case (Tensor() as x,) if x.ndim >= 3:
                return found.model, tuple(x.shape)
        name, given = type(found.model).__name__, len(found.inputs)
        raise NoModel(f"{name} is called with {given} arguments; accepted: one tensor (N, C, ...)") from None
    except SystemExit:
        pass
    finally:
        hook.remove()
    raise NoModel("the script ends before it calls a model in training")
