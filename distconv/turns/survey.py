"""Predicts the memory of the calls of a script's models in turn, and reports each before it is computed."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distconv.settings.partition import Partition
from distconv.turns.automatic import followed_as
from distconv.turns.following import Followed, call_kind, follow_call


@dataclass(frozen=True)
class FollowedCall:
    """A call of a model, with the backward of the sum of its results where autograd records it."""

    module: str  # The name of its class.
    inputs: tuple[tuple[int, ...], ...]  # The shapes of its tensors.
    parts: str  # The partition whose parts are computed in turn.
    followed: Followed  # What it takes in turn.
    alone: Followed  # What it takes in one process.


class Survey:
    """Follows the first call of each model with inputs of new shapes."""

    def __init__(
        self, memory: int | None, report: Callable[[FollowedCall], None], ranks: Partition | None = None
    ) -> None:
        """
        Args:
            memory: the limit of the parts' tensors, in bytes.
            report: is called with each call once it was followed, before it is computed.
            ranks: the first of these is followed, all having such parts; None: there is one process.
        """
        self.calls: list[FollowedCall] = []  # Those that were followed.
        self._memory, self._report, self._ranks = memory, report, ranks
        self._known: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()

    def follow(self, module: nn.Module, args: Any, kwargs: Any, partition: Partition) -> None:
        """Follows a call, unless one of its kind is known. Raises what the call would raise."""
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        trained, *others = call_kind(module, inputs)
        known, kind = self._known.setdefault(module, set()), (partition, trained, *others)
        if kind in known:
            return
        known.add(kind)
        with followed_as(trained):
            alone = follow_call(module, args, kwargs, None, backward=trained)
            parts = follow_call(module, args, kwargs, partition, self._memory, trained, self._ranks)
        shapes = tuple(tuple(x.shape) for x in inputs)
        self.calls.append(FollowedCall(type(module).__name__, shapes, str(partition), parts, alone))
        self._report(self.calls[-1])
