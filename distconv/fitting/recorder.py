"""Records a call that is followed by the shapes of its tensors, as a `Timeline` of its operators and storages."""

from __future__ import annotations

import bisect
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from distconv.fitting.timeline import Storage, Timeline
from distconv.model.direct.activation import Activation
from distconv.model.direct.chains.choice import Prices
from distconv.rules.schemas import changed_tensors
from distconv.tensors.dtensors import wrap_strided
from distconv.turns.operations import convolutions_of, operations_of, scratch_bytes
from distconv.turns.shapes_only import fake_tensors


class Recorder:
    """Is notified of every operator of a call (`see`), and of every tensor that autograd saves and unpacks.

    ``known``: the parameters, buffers and inputs.
    """

    def __init__(self, prices: Prices, known: Sequence[Tensor]) -> None:
        self.timeline, self._prices = Timeline(), prices
        self._numbers: dict[int, int] = {}  # Numbers of the storages that are alive, by address.
        self._sequence: list[int] = []  # By tick of forward: the number that autograd gives to its next node.
        self._last_forward_tick, self._is_restoring = 0, False
        self._restored: dict[int, weakref.ref[Tensor]] = {}
        self._in_forward = True
        self.of_thread = threading.local()  # `propagates`: an operator runs only for the shapes of its results.
        self.saves = 0  # How often autograd has saved a tensor.
        self.statistics: list[tuple[int, int]] = []
        """The ticks that changed running statistics, and the ids of these tensors."""
        self.draws: list[int] = []  # The ticks that drew numbers from a generator of the program.
        for x in known:
            self._add(x, -1)
        self.timeline.initial = sum(storage.size for storage in self.timeline.storages.values())

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Is called after each operator."""
        if self._is_restoring or getattr(self.of_thread, "propagates", False):
            return
        made, given = fake_tensors((result,)), fake_tensors((*args, *kwargs.values()))
        addresses = {x.untyped_storage()._cdata for x in given}
        writes = func._schema.is_mutable
        if not writes and all(x.untyped_storage()._cdata in addresses for x in made):
            return  # a view
        timeline, tick = self.timeline, len(self.timeline.seconds)
        if writes and self._in_forward:
            for number in self.numbers_of(changed_tensors(func, args, kwargs)):
                timeline.storages[number].written = tick
        if any(isinstance(x, torch.Generator) for x in (*args, *kwargs.values())):
            self.draws.append(tick)
        if "batch_norm" in func._schema.name:  # which writes running statistics that its schema only reads
            self.statistics += [(tick, id(x)) for x in args[3:5] if isinstance(x, Tensor)]
        for x in made:
            self._add(x, tick)
        operations = operations_of(func, args, kwargs, result)
        timeline.operations += operations
        moved = sum(x.numel() * x.element_size() for x in (*given, *made))
        timeline.seconds.append(operations * self._prices.operation + moved * self._prices.written)
        timeline.scratch.append(scratch_bytes(func, args, made))
        timeline.convolutions += [(tick, call.kind) for call in convolutions_of(func, args)]
        # Parts cut all tensors but parameters, inputs, and gradients, which have the shapes of these.
        uncut = {tuple(x.shape) for x in given if timeline.storages[self._numbers[x.untyped_storage()._cdata]].made < 0}
        divided = sum(x.numel() * x.element_size() for x in (*given, *made) if tuple(x.shape) not in uncut)
        timeline.largest = max(timeline.largest, divided)
        timeline.forward_tick.append(self._forward_tick(tick))

    def _forward_tick(self, tick: int) -> int:
        """The tick of forward that the operator of this tick belongs to."""
        if self._in_forward:
            self._sequence.append(torch._C._autograd._get_sequence_nr())
            return tick
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if node is not None and 0 <= number < (1 << 62):  # else the node that adds up the gradient of a parameter
            self._last_forward_tick = bisect.bisect_right(self._sequence, number)
        elif node is None:
            self._last_forward_tick = max(self._last_forward_tick, len(self._sequence) - 1)
        return min(self._last_forward_tick, len(self._sequence) - 1)

    def _add(self, x: Tensor, tick: int) -> None:
        storage = x.untyped_storage()
        address = storage._cdata
        if address in self._numbers:
            return
        number = self._numbers[address] = len(self.timeline.storages)
        self.timeline.storages[number] = Storage(storage.nbytes(), tick)
        weakref.finalize(storage, self._program_has_released, address, number).atexit = False

    def save(self, x: Tensor) -> Any:
        """The hook by which autograd saves a tensor: autograd gets a description instead, so that the tensor lives only
        as long as the program refers to it."""
        if isinstance(x, DTensor):
            return x._spec, self.save(local_tensor(x))
        number = self._numbers.get(x.untyped_storage()._cdata) if self._in_forward else None
        if number is None or self.timeline.storages[number].made < 0:
            return x
        storage = self.timeline.storages[number]
        storage.saved, storage.save_number = len(self.timeline.seconds), self.saves
        self.saves += 1
        return number, x.dtype, x.storage_offset(), x.size(), x.stride()

    def restore(self, saved: Any) -> Tensor:
        """The hook by which backward gets a saved tensor back: a new one like it, as long as backward refers to it."""
        if isinstance(saved, Tensor):
            return saved
        if len(saved) == 2:
            layout, local = saved
            return wrap_strided(self.restore(local), layout.mesh, layout.placements, layout.shape, layout.stride)
        number, dtype, offset, size, stride = saved
        record, before = self.timeline.storages[number], self._restored.get(number, lambda: None)()
        record.first_used = len(self.timeline.seconds) if record.first_used is None else record.first_used
        self._is_restoring = True
        if before is None or before.dtype != dtype:
            before = torch.empty(record.size // dtype.itemsize, dtype=dtype, device="cpu")
            storage = before.untyped_storage()
            self._numbers[storage._cdata] = number
            weakref.finalize(storage, self._backward_has_freed, storage._cdata, record).atexit = False
        x = before.detach().as_strided(size, stride, offset)
        self._restored[number], self._is_restoring = weakref.ref(x), False
        return x

    def _backward_has_freed(self, address: int, record: Storage) -> None:
        del self._numbers[address]
        record.freed = len(self.timeline.seconds) - 1

    def _program_has_released(self, address: int, number: int) -> None:
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self.timeline.storages[number].released = len(self.timeline.seconds) - 1

    def number_of(self, x: Tensor) -> int | None:
        """The number of a tensor's storage; None for one with numbers."""
        with torch._C.DisableTorchFunction():  # A mode would look at each of many thousands of parameters.
            return self._numbers.get(local_tensor(x).untyped_storage()._cdata)

    def numbers_of(self, values: Any) -> frozenset[int]:
        """The numbers of the storages of all tensors in a value; of distributed ones, of the local tensors."""
        found = [local_tensor(x) for x in tree_leaves(values) if isinstance(x, Tensor)]
        with torch._C.DisableTorchFunction():
            return frozenset(self._numbers[x.untyped_storage()._cdata] for x in found if isinstance(x, FakeTensor))

    def end_forward(self) -> None:
        """The operators from now on are those of backward."""
        self._in_forward, self.timeline.forward = False, len(self.timeline.seconds)


def local_tensor(x: Tensor) -> Tensor:
    """The local tensor of a distributed one; a plain tensor as it is."""
    if isinstance(x, Activation):
        return x.root if x.dtensor is None else x.dtensor._local_tensor  # type: ignore[return-value]
    return x._local_tensor if isinstance(x, DTensor) else x
