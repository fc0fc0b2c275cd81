"""Counts the bytes of tensors that are alive, and their peak."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves

from mucudnn.process import substituted


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


@contextlib.contextmanager
def shapes_uncounted(counter: Any) -> Iterator[None]:
    """A context in which ``counter.propagates`` is set while DTensor runs an operator on whole tensors without numbers
    only to learn the shapes of its results: such operators are not to be counted."""
    propagate: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(propagator: Any, schema: Any) -> Any:
        counter.propagates = True
        try:
            return propagate(propagator, schema)
        finally:
            counter.propagates = False

    with substituted(ShardingPropagator, _propagate_tensor_meta_non_cached=uncounted):
        yield
