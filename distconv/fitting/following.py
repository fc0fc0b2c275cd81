"""Follows a call of a model in one process by the shapes of its tensors."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from distconv import settings
from distconv.fitting.recorder import Recorder, local_tensor
from distconv.fitting.timeline import Extent, Segment, Timeline
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


MOST = 32  # Children of an `nn.Sequential` in one segment, as each pair of a first and a last one makes one.


class ModuleCalls:
    """A context in which the calls of a model's modules are recorded.

    ``every_buffer``: whether a call may change any of its buffers, as ranks do at the end of the model's call.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, every_buffer: bool) -> None:
        self._model, self._recorder, self._extents = model, recorder, recorder.timeline.extents
        self._every_buffer = every_buffer
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._rows = {
            id(child): (row, at)
            for row in model.modules()
            if isinstance(row, nn.Sequential) and type(row).forward is nn.Sequential.forward
            for at, child in enumerate(row.children())
        }
        self._count: dict[str, int] = {}
        self._running: list[tuple[nn.Module, Segment, tuple[int, int], Any]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            self._hooks += [
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: self._begin(module, (args, kwargs), name), with_kwargs=True
                ),
                module.register_forward_hook(self._end),
            ]

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def end_forward(self) -> None:
        """Forward has ended: to be computed again, a segment must be given what it was given then."""
        storages = self._recorder.timeline.storages
        for extent in self._extents:
            extent.again &= all(storages[number].written < extent.first for number in extent.given)

    def _begin(self, module: nn.Module, given: Any, name: str) -> None:
        number = self._count[name] = self._count.get(name, -1) + 1
        given = self._recorder.numbers_of(given)  # not the tensors, which the call may release
        state = [(x, x._version) for x in (*module.parameters(), *module.buffers())]
        began = len(self._recorder.timeline.seconds), self._recorder.saves
        before = given, state, _attributes(module), _drawn()
        self._running.append((module, Segment(name, number), began, before))

    def _end(self, module: nn.Module, _: Any, result: Any) -> None:
        _, segment, (first, save), (given, state, attributes, drawn) = self._running.pop()
        end, saves = len(self._recorder.timeline.seconds), (save, self._recorder.saves)
        changed = {id(x) for x, version in state if x._version != version}
        if self._every_buffer:
            changed |= {id(x) for x in module.buffers()}
        else:
            changed |= {x for tick, x in self._recorder.statistics if tick >= first}
        buffers = tuple(sorted(self._buffers[x] for x in changed if x in self._buffers))
        again = len(buffers) == len(changed) and attributes == _attributes(module) and drawn == _drawn()
        made = self._recorder.numbers_of(result)
        extent = Extent(segment, first, end, saves, given, made, again, buffers)
        self._add(extent)
        row, at = self._rows.get(id(module), (None, 0))
        if row is not None and self._running and self._running[-1][0] is row:
            self._join(self._running[-1][1], at, replace(extent))

    def _add(self, extent: Extent) -> None:
        if extent.end > extent.first:
            self._extents.append(extent)

    def _join(self, row: Segment, at: int, last: Extent) -> None:
        """Adds the segments of several children in a row that end with ``last``, child ``at``."""
        for each in list(self._extents):
            children = each.segment.children
            if each.segment[:2] == row[:2] and children is not None and at == children[1] < children[0] + MOST:
                segment = Segment(*row[:2], (children[0], at + 1))
                buffers = tuple(sorted({*each.buffers, *last.buffers}))
                again = each.again and last.again
                saves = each.saves[0], last.saves[1]
                self._add(Extent(segment, each.first, last.end, saves, each.given, last.made, again, buffers))
        last.segment = Segment(*row[:2], (at, at + 1))
        self._add(last)


def _drawn() -> Any:
    return random.getstate(), numpy.random.get_state()[2:], numpy.random.get_state()[1][:2].tolist()  # type: ignore[index]


def _attributes(module: nn.Module) -> list[tuple[int, str, int]]:
    """What a module and those in it have beside parameters and modules."""
    own = ("_parameters", "_buffers", "_modules")
    return [
        (number, name, id(value))
        for number, each in enumerate(module.modules())
        for name, value in [*vars(each).items(), *each._buffers.items()]
        if name not in own
    ]
