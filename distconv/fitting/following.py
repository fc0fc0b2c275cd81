"""Follows a call of a model in one process by the shapes of its tensors."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from distconv import settings
from distconv.fitting.module_calls import ModuleCalls
from distconv.fitting.recorder import Recorder, local_tensor
from distconv.fitting.timeline import Timeline
from distconv.model.direct.chains.choice import Prices
from distconv.model.shard_gather import to_shards
from distconv.settings.partition import Partition
from distconv.tensors.dtensors import wrap_strided
from distconv.transfer.tracing import shapes_followed
from distconv.turns.following import backward_of_sum, shapes_uncounted, without_numbers
from distconv.turns.parts import Parts
from distconv.turns.shapes_only import ShapesOnly
from distconv.turns.turning import not_in_turn


def followed(
    module: nn.Module, args: Any, kwargs: Any, backward: bool, prices: Prices, ranks: Partition | None = None
) -> Timeline:
    """Follows a call, with the backward of the sum of its results. The module stays as it is, and so do the generators
    of random numbers. Raises what the call raises.

    ``ranks``: those that compute it, of which the first is followed; None: one process.
    """
    shapes = ShapesOnly()
    leaves, form = tree_flatten((args, kwargs))
    layouts = [x._spec if isinstance(x, DTensor) else None for x in leaves]  # of what another model has given
    args, kwargs = tree_unflatten([_local(x) for x in leaves], form)
    with _random_numbers_kept():
        copied, args, kwargs, known = without_numbers(module, args, kwargs, shapes)
        recorder = Recorder(prices, known)
        shapes.seen = recorder.see
        calls = ModuleCalls(copied, recorder, every_buffer=ranks is not None)

        def follow(args: Any, kwargs: Any) -> None:
            saved = torch.autograd.graph.saved_tensors_hooks(recorder.save, recorder.restore)
            with calls, shapes_followed(), shapes_uncounted(recorder.of_thread), shapes:
                with saved:
                    y = copied(*args, **kwargs)
                recorder.end_forward()
                calls.end_forward()
                made = [x for x in tree_leaves(y) if isinstance(x, Tensor)]
                if backward:
                    backward_of_sum(made)
            storages = [local_tensor(x).untyped_storage() for x in made]
            recorder.timeline.results = sum({each._cdata: each.nbytes() for each in storages}.values())

        if ranks is None:
            follow(args, kwargs)
        else:
            first = _first_of(ranks, os.getpid())
            dims = max((x.dim() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), default=0)

            def of_first(_: int) -> None:
                mesh, given = first.meshes[0], tree_leaves((args, kwargs))
                with shapes_followed(), shapes:
                    own = [_entering(x, layout, mesh, dims) for x, layout in zip(given, layouts, strict=True)]
                follow(*tree_unflatten(own, form))

            with not_in_turn(), settings.within_call({"check": "off"}):
                first.run(of_first)
    return recorder.timeline


def _local(x: Any) -> Any:
    return x._local_tensor.detach().requires_grad_(x.requires_grad) if isinstance(x, DTensor) else x


def _entering(x: Any, layout: DTensorSpec | None, mesh: DeviceMesh, dims: int) -> Any:
    """An argument of a call as ranks are given it: a rank's part of a whole tensor, or of one that has a layout."""
    if not isinstance(x, Tensor):
        return x
    if layout is None:
        return to_shards(x, mesh, dims)
    return wrap_strided(x, mesh, layout.placements, layout.shape, layout.stride, x.requires_grad)


@functools.lru_cache(maxsize=8)
def _first_of(ranks: Partition, process: int) -> Parts:
    """A thread that is the first of some ranks, and the only one; gradients of parameters are summed up as on these."""
    return Parts(Partition(()), "cpu", None, ranks, adds_gradients=False)


@contextlib.contextmanager
def _random_numbers_kept() -> Iterator[None]:
    python, arrays = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        numpy.random.set_state(arrays)
