"""Makes `torch.utils.checkpoint` save an activation as a tensor of autograd's graph, and recompute in the same run.

Autograd records the root of an activation, or its DTensor, but not the activation itself. So a saved activation would
lose its gradient when hooks pack it, such as those of an outer checkpoint or of `save_on_cpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.utils.checkpoint

from distconv.model.direct.activation import Activation, activation, from_dtensor
from distconv.model.direct.chains.call import computed_again
from distconv.model.direct.selective_checkpoints import open_selective_checkpoints
from distconv.private_names import CHECKPOINTS, lacks, refused
from distconv.tensors.replacements import in_place_of, replace, until_put_back


def _saved(value: Any) -> tuple[Any, Callable[[Any], Any] | None]:
    """The tensor that is saved for an argument, and what makes an activation of it again if the argument is one."""
    if type(value) is not Activation or value.share is not None:
        return value, None
    if value.dtensor is None:
        return value.root, functools.partial(activation, place=value.place)
    return value.dtensor, from_dtensor


def _entered(enter: Callable[[Any], Any], self: Any) -> Any:
    """Makes checkpointed functions fetch their own halos: recomputed in a chain, they would need equally wide ones."""
    self.distconv_again = computed_again()
    self.distconv_again.__enter__()
    return enter(self)


def _left(leave: Callable[..., Any], self: Any, *error: Any) -> Any:
    self.distconv_again.__exit__(None, None, None)
    return leave(self, *error)


def _save_inputs(save: Callable[..., Any], self: Any, *args: Any) -> None:
    pairs = [_saved(arg) for arg in args]
    self.distconv_makers = [make for _, make in pairs]
    save(self, *(value for value, _ in pairs))


def _get_inputs(get: Callable[[Any], list[Any]], self: Any) -> list[Any]:
    values = get(self)
    makers = getattr(self, "distconv_makers", [None] * len(values))  # they may be from before `open_checkpoints`
    return [x if make is None else make(x) for x, make in zip(values, makers, strict=True)]


@until_put_back
def open_checkpoints(within_this_run: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Makes checkpoints save tensors of autograd's graph, and recompute in the run of the model in which they began.

    In older releases of torch a function of autograd saves the inputs, and it is given DTensors.

    ``within_this_run``: wraps a function so that it is always called in the run that is current now.
    """
    if line := lacks(CHECKPOINTS):
        replace(torch.utils.checkpoint, "checkpoint", refused(line))
        return

    def begun(begin: Callable[..., Any], self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, computed_again()(within_this_run(recompute_fn)), *args, **kwargs)

    frame: Any = torch.utils.checkpoint._CheckpointFrame
    hook: Any = torch.utils.checkpoint._checkpoint_hook
    functions: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        *((frame, "__init__", begun), (frame, "save_inputs", _save_inputs), (frame, "get_inputs", _get_inputs)),
        *((hook, "__enter__", _entered), (hook, "__exit__", _left)),
    )
    for owner, name, function in functions:
        if hasattr(owner, name):
            replace(owner, name, in_place_of(getattr(owner, name), function))
    open_selective_checkpoints()
