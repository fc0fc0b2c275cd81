"""Follows a call of a model by the shapes of its tensors, without numbers: its operators, storages and segments."""

from __future__ import annotations

import functools
import random
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
from distconv.fitting.sharded_parameters import count_shards
from distconv.fitting.state_changes import StateChanges, unwatched_version
from distconv.fitting.timeline import Segment, SegmentRecord, Timeline
from distconv.model.direct.chains.choice import Prices
from distconv.model.shard_gather import to_shards
from distconv.settings.partition import Partition
from distconv.tensors.dtensors import wrap_strided
from distconv.tensors.memory import shapes_uncounted
from distconv.transfer.tracing import shapes_followed
from distconv.turns.asked_numbers import asked_here
from distconv.turns.copied_models import without_numbers
from distconv.turns.following import backward_of_sum
from distconv.turns.parts import parts_of
from distconv.turns.reach import hooks_of_all_modules
from distconv.turns.shapes_only import ShapesOnly
from distconv.turns.turning import not_in_turn
from distconv.turns.writes import KeepsNumbers

AS_FOLLOWED = {"check": "off", "shard_parameters": "off"}
"""Settings while a call of ranks is followed: by one of them alone, with whole parameters (`count_shards`)."""


def followed(
    module: nn.Module, args: Any, kwargs: Any, backward: bool, prices: Prices, ranks: Partition | None = None
) -> Timeline:
    """Follows a call, with the backward of the sum of its results if asked for. The module stays as it is; whatever
    else the call changes, `StateBefore` puts back. Raises what the call raises.

    ``ranks``: the partition of the ranks that compute the call, of which the first is followed; None: one process.
    """
    shapes = ShapesOnly()
    leaves, form = tree_flatten((args, kwargs))
    layouts = [x._spec if isinstance(x, DTensor) else None for x in leaves]  # of results of other models
    args, kwargs = tree_unflatten([_local(x) for x in leaves], form)
    copied, args, kwargs, known = without_numbers(module, args, kwargs, shapes)
    recorder = Recorder(prices, known)
    shapes.seen = recorder.see
    # Without backward nothing is kept for it, and segments within the call have nothing to give up.
    calls = ModuleCalls(copied, recorder, every_buffer=ranks is not None, every_module=backward)

    def follow(args: Any, kwargs: Any) -> None:
        saved = torch.autograd.graph.saved_tensors_hooks(recorder.save, recorder.restore)
        uncounted = shapes_uncounted(recorder.of_thread)
        with calls, shapes_followed(), uncounted, shapes, KeepsNumbers():
            with saved:
                y = copied(*args, **kwargs)
            recorder.end_forward()
            calls.check_inputs()
            made = [x for x in tree_leaves(y) if isinstance(x, Tensor)]
            if backward:
                backward_of_sum(made)
        storages = [local_tensor(x).untyped_storage() for x in made]
        recorder.timeline.results = sum({each._cdata: each.nbytes() for each in storages}.values())

    if ranks is None:
        follow(args, kwargs)
    else:
        # A thread that is the first of the ranks, the others being imagined; gradients are summed as on ranks.
        first = parts_of(Partition(()), "cpu", imagined=ranks, adds_gradients=False)
        dims = max((x.dim() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), default=0)

        def of_first(_: int) -> None:
            mesh, given = first.meshes[0], tree_leaves((args, kwargs))
            with shapes_followed(), shapes:
                shards = [_as_input(x, layout, mesh, dims) for x, layout in zip(given, layouts, strict=True)]
            follow(*tree_unflatten(shards, form))

        with not_in_turn(), settings.within_call(AS_FOLLOWED):
            first.run(of_first)
        count_shards(module, copied, recorder)
    return recorder.timeline


def _local(x: Any) -> Any:
    return x._local_tensor.detach().requires_grad_(x.requires_grad) if isinstance(x, DTensor) else x


def _as_input(x: Any, layout: DTensorSpec | None, mesh: DeviceMesh, dims: int) -> Any:
    """An argument as the model gets it on a rank: sharded, from a whole tensor or from the local tensor of a layout."""
    if not isinstance(x, Tensor):
        return x
    if layout is None:
        return to_shards(x, mesh, dims)
    return wrap_strided(x, mesh, layout.placements, layout.shape, layout.stride, x.requires_grad)


MOST = 32  # Children of an `nn.Sequential` in one segment: each pair of a first and a last child makes a segment.


class ModuleCalls:
    """A context in which each call of a model's modules becomes a segment.

    Args:
        every_buffer: whether a call may change any of its buffers, as ranks do at the end of the model's call.
        every_module: whether the calls of modules within the model become segments, too.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, every_buffer: bool, every_module: bool) -> None:
        self._recorder, self._records = recorder, recorder.timeline.segments
        self._followed = [*model.named_modules()] if every_module else [("", model)]
        self._every_buffer = every_buffer
        self._buffers = {id(buffer): name for name, buffer in model.named_buffers()}
        self._sequentials = {
            id(child): (sequential, at)
            for sequential in model.modules()
            if isinstance(sequential, nn.Sequential) and type(sequential).forward is nn.Sequential.forward
            for at, child in enumerate(sequential.children())
        }
        self._calls: dict[str, int] = {}
        self._changes = StateChanges(model)
        if not every_module:
            for module in model.modules():
                self._changes.watch(module)
        self._running: list[tuple[nn.Module, Segment, tuple[int, int], Any]] = []
        self._hooks: list[Any] = []

    def __enter__(self) -> None:
        has_hooks = bool(hooks_of_all_modules())
        for name, module in self._followed:
            keeps_state = has_hooks or not _is_layer_of_torch(module)
            begin = functools.partial(self._begin, name=name, keeps_state=keeps_state)
            if keeps_state:
                # What the module's own hooks change before its forward, as pruning does, its parents change, too.
                begin_hooks = module.register_forward_pre_hook(
                    lambda module, _: self._changes.begin(module, has_hooks or _hooks_before(module) > 2), prepend=True
                )
                self._hooks.append(begin_hooks)
            self._hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._end))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def check_inputs(self) -> None:
        """After forward: a segment cannot be computed again from inputs or parameters that were changed in it or later,
        even if autograd did not see that (``.data``)."""
        storages = self._recorder.timeline.storages
        for record in self._records:
            numbers = record.inputs | record.read
            record.repeatable &= all(storages[number].written < record.first for number in numbers)

    def _begin(self, module: nn.Module, args: Any, kwargs: Any, name: str, keeps_state: bool) -> None:
        call = self._calls[name] = self._calls.get(name, -1) + 1
        if keeps_state:
            self._changes.begin_forward(args, kwargs)
        inputs = self._recorder.numbers_of((args, kwargs))  # not the tensors, which the call may release
        number_of = self._recorder.number_of
        state = [(x, unwatched_version(x), number_of(x)) for x in (*module.parameters(), *module.buffers())]
        began = len(self._recorder.timeline.seconds), self._recorder.saves
        states = _generator_states() if keeps_state else None
        before = inputs, state, (self._changes.count, _values_asked_for()), states
        self._running.append((module, Segment(name, call), began, before))

    def _end(self, module: nn.Module, _: Any, result: Any) -> None:
        _, segment, (first, save), (inputs, state, changes, states) = self._running.pop()
        if states is not None:
            self._changes.end()
        end, saves = len(self._recorder.timeline.seconds), (save, self._recorder.saves)
        # ``.data =`` leaves the version as it is.
        number_of = self._recorder.number_of
        changed = {id(x) for x, version, before in state if unwatched_version(x) != version or number_of(x) != before}
        if self._every_buffer:
            changed |= {id(x) for x in module.buffers()}
        else:
            changed |= {x for tick, x in self._recorder.statistics if tick >= first}
            storages = self._recorder.timeline.storages  # which show what is written by way of ``.data``, too
            numbers = ((x, number_of(x)) for x in module.buffers())
            changed |= {id(x) for x, number in numbers if number is not None and storages[number].written >= first}
        buffers = tuple(sorted(self._buffers[x] for x in changed if x in self._buffers))
        # What a program does with a number, such as to change its state, may differ in a later call.
        changed_state = changes != (self._changes.count, _values_asked_for())
        changed_state |= states is not None and states != _generator_states()
        changed_state |= any(tick >= first for tick in self._recorder.draws)
        repeatable = len(buffers) == len(changed) and not changed_state
        results = self._recorder.numbers_of(result)
        read = self._recorder.numbers_of([*module.parameters()])
        record = SegmentRecord(segment, first, end, saves, inputs, results, repeatable, buffers, read)
        self._add(record)
        sequential, at = self._sequentials.get(id(module), (None, 0))
        if sequential is not None and self._running and self._running[-1][0] is sequential:
            self._add_neighbours(self._running[-1][1], at, replace(record))

    def _add(self, record: SegmentRecord) -> None:
        if record.end > record.first:
            self._records.append(record)

    def _add_neighbours(self, sequential: Segment, at: int, last: SegmentRecord) -> None:
        """Adds the segments of neighbouring children whose last is child ``at``, a call recorded as ``last``."""
        call = sequential[:2]
        for each in list(self._records):
            children = each.segment.children
            if each.segment[:2] == call and children is not None and at == children[1] < children[0] + MOST:
                segment = Segment(*call, (children[0], at + 1))
                buffers = tuple(sorted({*each.buffers, *last.buffers}))
                repeatable, saves = each.repeatable and last.repeatable, (each.saves[0], last.saves[1])
                of_both = (
                    each.first,
                    last.end,
                    saves,
                    each.inputs,
                    last.results,
                    repeatable,
                    buffers,
                    each.read | last.read,
                )
                self._add(SegmentRecord(segment, *of_both))
        last.segment = Segment(*call, (at, at + 1))
        self._add(last)


def _hooks_before(module: nn.Module) -> int:
    return len(vars(module)["_forward_pre_hooks"])


def _is_layer_of_torch(module: nn.Module) -> bool:
    """Whether a module is a layer of torch's own, without hooks: its forward changes no state of Python."""
    kind, own = type(module), vars(module)
    changed = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_modules"] or "forward" in own
    return not changed and all(each.__module__.startswith("torch.nn.modules.") for each in (kind, kind.forward))


def _values_asked_for() -> int:
    asked = asked_here()
    return 0 if asked is None else asked.values


def _generator_states() -> Any:
    """The states of Python's generator and of NumPy's, to find whether numbers were drawn."""
    of_numpy: Any = numpy.random.get_state()
    return random.getstate(), of_numpy[2:], of_numpy[1][:2].tolist()
