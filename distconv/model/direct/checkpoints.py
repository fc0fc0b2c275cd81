"""What `torch.utils.checkpoint` keeps of an activation: the tensor that autograd knows, and the run of the model.

An activation is a plain tensor to autograd's record. So a saved activation loses its gradient when hooks pack it, such
as those of an outer checkpoint or of `save_on_cpu`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch.utils.checkpoint

from distconv.model.direct.activation import Activation, activation, from_dtensor
from distconv.model.direct.chains.call import unchained
from distconv.model.direct.where import Where
from distconv.private_names import CHECKPOINTS, lacks, refused
from distconv.tensors.replacements import replace, until_put_back


class _Form(NamedTuple):
    """How an activation is restored from the tensor that was kept."""

    place: Where
    is_root: bool


def _kept(value: Any) -> tuple[Any, _Form | None]:
    """The tensor that autograd saves for a value, and how the value is restored from it."""
    if type(value) is not Activation or value.share is not None:
        return value, None
    if value.dtensor is None:
        return value.root, _Form(value.place, True)
    return value.dtensor, _Form(value.place, False)


def _again(value: Any, form: _Form | None) -> Any:
    if form is None:
        return value
    return activation(value, form.place) if form.is_root else from_dtensor(value)


def _apart(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def computed(*args: Any) -> Any:
        with unchained():
            return function(*args)

    return computed


def _leave_chains() -> None:
    """Lets what a checkpoint computes stay out of chains: what is computed again would have to fetch as wide halos."""
    hook: Any = torch.utils.checkpoint._checkpoint_hook
    enter, leave = hook.__enter__, hook.__exit__

    @functools.wraps(enter)
    def entered(self: Any) -> Any:
        self.distconv_unchained = unchained()
        self.distconv_unchained.__enter__()
        return enter(self)

    @functools.wraps(leave)
    def left(self: Any, *error: Any) -> Any:
        self.distconv_unchained.__exit__(None, None, None)
        return leave(self, *error)

    replace(hook, "__enter__", entered)
    replace(hook, "__exit__", left)


@until_put_back
def open_checkpoints(within_this_run: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Makes checkpoints keep the tensors that autograd knows, and recompute in the run of the model in which they
    began.

    In releases of torch whose frames do not save inputs themselves, a function of autograd does, which gets DTensors.

    Args:
        within_this_run: makes, of the function that computes again, one that does so in what runs now.
    """
    if line := lacks(CHECKPOINTS):
        replace(torch.utils.checkpoint, "checkpoint", refused(line))
        return
    frame: Any = torch.utils.checkpoint._CheckpointFrame
    begin = frame.__init__

    @functools.wraps(begin)
    def begun(self: Any, recompute_fn: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, _apart(within_this_run(recompute_fn)), *args, **kwargs)

    replace(frame, "__init__", begun)
    _leave_chains()
    if not hasattr(frame, "save_inputs"):
        return
    save, get = frame.save_inputs, frame.get_inputs

    @functools.wraps(save)
    def save_inputs(self: Any, *args: Any) -> None:
        pairs = [_kept(arg) for arg in args]
        self.distconv_forms = [form for _, form in pairs]
        save(self, *(value for value, _ in pairs))

    @functools.wraps(get)
    def get_inputs(self: Any) -> list[Any]:
        forms = getattr(self, "distconv_forms", None)  # none where they were saved before
        values = get(self)
        return values if forms is None else [_again(value, form) for value, form in zip(values, forms, strict=True)]

    replace(frame, "save_inputs", save_inputs)
    replace(frame, "get_inputs", get_inputs)
