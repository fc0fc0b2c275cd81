"""Runs a script up to the end of its first optimizer step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class _Enough(BaseException):
    """The first step of an optimizer has ended."""


def _end(optimizer: Optimizer, *_: object) -> None:
    raise _Enough


@contextlib.contextmanager
def up_to_first_step() -> Iterator[None]:
    """A context that the program leaves after the first step of an optimizer, or at its own end."""
    hook = register_optimizer_step_post_hook(_end)
    try:
        with contextlib.suppress(_Enough, SystemExit):
            yield
    finally:
        hook.remove()
