"""Computes a call that ran in parts once more, whole, where gradients of its gradients are asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from distconv.fitting.again import Again
from distconv.turns.methods import forward_replaced
from distconv.turns.random_numbers import RandomNumbers
from distconv.turns.surroundings import Surroundings


def whole_again(
    buffers: Sequence[str], device: str, noticed: Callable[[], None], module: nn.Module, args: Any, kwargs: Any
) -> Callable[[], Any]:
    """A function that computes a call as plain torch does, with the random numbers and the autocast of now.

    Args:
        buffers: the names of those that the call changes; they stay as they are.
        device: the kind of the module's device.
        noticed: is called at each such computation.
    """
    changed = [module.get_buffer(name) for name in buffers]
    again = Again(nn.Module.__call__, [module], changed, (args, kwargs))
    forward = vars(module).get("forward")  # that of a method which is called in place of the module
    surroundings, numbers = Surroundings.now(device), RandomNumbers(1, device)

    def compute() -> Any:
        noticed()
        now = RandomNumbers(1, device)
        numbers.hand_over()
        try:
            with contextlib.nullcontext() if forward is None else forward_replaced(module, forward):
                return surroundings.run(lambda: again(module, *args, **kwargs))
        finally:
            now.hand_over()

    return compute
