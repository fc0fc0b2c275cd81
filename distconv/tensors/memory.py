"""Counts the bytes of tensors that are alive, and their peak."""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


class TensorMemory:
    """Counts every storage once, from the operator that made it until it is freed."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._alive: dict[int, int] = {}

    def count(self, results: Any) -> None:
        """Takes what an operator returned into account."""
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and not isinstance(result, DTensor) and result.device.type != "meta":
                self._add(result)

    def _add(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self._alive:
            return
        self._alive[key] = storage.nbytes()
        self.now += self._alive[key]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, key).atexit = False

    def _drop(self, key: int) -> None:
        self.now -= self._alive.pop(key)
