"""Records the calls of a model's modules while it is followed: the segments that may give something up."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy
from torch import nn

from distconv.fitting.recorder import Recorder
from distconv.fitting.timeline import Extent, Segment

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
