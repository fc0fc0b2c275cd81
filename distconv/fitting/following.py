"""Follows a call of a model in one process by the shapes of its tensors."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distconv.fitting.module_calls import ModuleCalls
from distconv.fitting.recorder import Recorder
from distconv.fitting.timeline import Timeline
from distconv.model.direct.chains.choice import Prices
from distconv.transfer.tracing import shapes_followed
from distconv.turns.following import without_numbers
from distconv.turns.shapes_only import ShapesOnly


def followed(module: nn.Module, args: Any, kwargs: Any, backward: bool, prices: Prices) -> Timeline:
    """Follows a call, with the backward of the sum of its results. The module stays as it is, and so do the generators
    of random numbers. Raises what the call raises.
    """
    shapes = ShapesOnly()
    with _random_numbers_kept():
        copied, args, kwargs, known = without_numbers(module, args, kwargs, shapes)
        recorder = Recorder(prices, known)
        calls = ModuleCalls(copied, recorder)
        saved = torch.autograd.graph.saved_tensors_hooks(recorder.save, recorder.restore)
        shapes.seen = recorder.see
        with calls, shapes_followed(), shapes:
            with saved:
                y = copied(*args, **kwargs)
            recorder.end_forward()
            calls.end_forward()
            made = [x for x in tree_leaves(y) if isinstance(x, Tensor)]
            if backward and (losses := [x.sum() for x in made if x.requires_grad]):
                sum(losses).backward()  # type: ignore[union-attr]
    storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in made}
    recorder.timeline.results = sum(storages.values())
    return recorder.timeline


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
