"""Predicts the memory and the moves of a call in turn from the shapes of its tensors, without computing anything.

The parts and what leaves the device are those of the call itself, of which only the numbers are left out.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from distconv import settings
from distconv.model.halos import share_choices
from distconv.settings.partition import Partition
from distconv.tensors.memory import TensorMemory
from distconv.transfer.tracing import shapes_followed
from distconv.turns.call import call_in_turn
from distconv.turns.group import PendingCollectives
from distconv.turns.pager import Pager, instead
from distconv.turns.pages import Paged
from distconv.turns.parts import parts_of
from distconv.turns.places import StoragePlace
from distconv.turns.scratch import scratch_bytes
from distconv.turns.shapes_only import ShapesOnly, fake_tensors
from mucudnn.process.substitution import substituted

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        torch.ops.aten._scaled_dot_product_flash_attention_backward
    ),
}
"""Attention on a processor, of which torch does not count the operations, by what has as many of them."""


def operations_of(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """The operations of an operator that convolves or multiplies matrices, else 0."""
    counted = ATTENTION.get(func.overloadpacket, func.overloadpacket)
    return int(flop_registry[counted](*args, **kwargs, out_val=result)) if counted in flop_registry else 0


@dataclass(frozen=True)
class Followed:
    """The memory and moves of one call, with the backward of the sum of its results where asked for; in bytes.

    Attributes:
        peak: the most of all tensors on the device, parameters, inputs and results included.
        with_scratch: as ``peak``, with what torch's kernels on a processor take beside the tensors.
        whole: of parameters, buffers and inputs, which no limit of the parts counts.
        results: of what the call gives, which it does not count either.
        spilled, fetched: what leaves the device, and comes back.
        exchanged: what parts get from each other.
        sent: what parts send to those of other ranks, besides gradients of parameters and results.
        operations: of convolutions and products of matrices, a multiplication and an addition being two.
    """

    peak: int
    whole: int
    results: int = 0
    spilled: int = 0
    fetched: int = 0
    exchanged: int = 0
    sent: int = 0
    operations: int = 0
    with_scratch: int = 0

    @property
    def limited(self) -> int:
        """The bytes that a limit of the parts counts."""
        return self.peak - self.whole - self.results

    @property
    def moved(self) -> int:
        """The bytes that leave the device and come back, together."""
        return self.spilled + self.fetched


_INTEGERS = torch.int32, torch.int64


def call_kind(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The kind of a module's call: calls of one kind take the same, so one is followed. The first item is whether
    autograd records the call.
    """
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (*module.parameters(), *inputs))
    device = next((p.device.type for p in module.parameters()), "cpu")
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    return trained, module.training, autocast, *((x.shape, x.dtype) for x in inputs)


@contextlib.contextmanager
def followed_as(trained: bool) -> Iterator[None]:
    """A context in which calls are followed, with their backward if they are ``trained``."""
    with torch.inference_mode(False), torch.set_grad_enabled(trained):
        yield


_surveyed: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()
"""The kinds of calls of which the links are known, by module."""


def choose_chains(module: nn.Module, args: Any, kwargs: Any, partition: Partition) -> None:
    """Where parts compute in chains, chooses them before the first call of a kind, which is followed for its links.

    Raises what the call raises.
    """
    if not settings.value("halo"):
        return
    kind = partition, *call_kind(module, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)])
    known = _surveyed.setdefault(module, set())
    if kind not in known:
        known.add(kind)
        follow_call(module, args, kwargs, partition, chained=False)


def follow_call(
    module: nn.Module,
    args: Any,
    kwargs: Any,
    partition: Partition | None,
    memory: int | None = None,
    backward: bool = False,
    ranks: Partition | None = None,
    chained: bool = True,
    call: Callable[..., Any] | None = None,
) -> Followed:
    """Follows a call in turn, or as one process does it where ``partition`` is None. The module stays as it is.

    Tensors on another device, or on none (meta), are followed as such on a processor.

    ``memory``: the limit of the parts' tensors. ``ranks``: the first of these is followed, all having such parts.
    ``chained``: chains of layers are chosen first, where the parts compute in chains. ``call``: as of `call_in_turn`.
    Raises what the call raises.
    """
    if chained and partition is not None and ranks is None:
        choose_chains(module, args, kwargs, partition)
    pager = FollowingPager()
    watch = _Watch(pager)
    shapes = ShapesOnly()
    copied, args, kwargs, known = without_numbers(module, args, kwargs, shapes)
    watch.count(known)
    whole = watch.memory.now
    is_whole = partition is None or (partition.ranks == 1 and ranks is None)
    parts = None if partition is None or is_whole else parts_of(partition, "cpu", imagined=ranks)
    pending = parts.pending if parts else PendingCollectives()
    moved, sent = pending.moved, pending.sent
    shapes.seen = watch.see
    with shapes_uncounted(pager.of_thread), instead(pager), shapes_followed(), shapes:
        y = call_in_turn(parts, memory, copied, args, kwargs, call=call) if parts else copied(*args, **kwargs)
        if backward:
            backward_of_sum(y)
    moved, sent = pending.moved - moved, pending.sent - sent
    storages = [x.untyped_storage() for x in tree_leaves(y) if isinstance(x, Tensor)]
    results = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return Followed(
        watch.peak, whole, results, pager.written, pager.read, moved, sent, watch.operations, watch.with_scratch
    )


def backward_of_sum(results: Any, as_of_loss: bool = True) -> None:
    """The backward of the sum of all results that need gradients; of complex ones the real parts are added up.

    ``as_of_loss``: their gradients have memory of their own, as a loss gives them; else they are one number, expanded.
    """
    found = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    sums = [(x * 1 if as_of_loss else x).sum() for x in found]
    if sums:
        sum(x.real if x.is_complex() else x for x in sums).backward()  # type: ignore[union-attr]


def without_numbers(
    module: nn.Module, args: Any, kwargs: Any, shapes: FakeTensorMode
) -> tuple[nn.Module, Any, Any, list[Tensor]]:
    """A copy of a module, and the arguments of a call, without numbers and on a processor; and all their tensors."""
    known: dict[int, Any] = {}
    kept = [value for each in module.modules() for value in vars(each).values() if type(value) in _KEEPING]
    for x in (*module.parameters(), *module.buffers(), *tree_leaves((args, kwargs, kept))):
        if isinstance(x, Tensor) and id(x) not in known:
            known[id(x)] = _without_numbers(x, shapes)
    copied = copy.deepcopy(module, dict(known))
    share_choices(module, copied)
    args, kwargs = tree_map_only(Tensor, lambda x: known[id(x)], (args, kwargs))
    return copied, args, kwargs, list(known.values())


_KEEPING = Tensor, list, tuple, dict
"""What a module may keep results in, of which torch makes no copies where autograd has recorded them."""


def _without_numbers(x: Tensor, shapes: FakeTensorMode) -> Tensor:
    """A tensor of the same layout on a processor, without numbers; a leaf for autograd, as a call in turn takes it.

    A single integer, such as a padding that is a buffer, keeps its number: programs compute shapes from these.
    """
    if x.device.type == "cpu" and x.numel() == 1 and x.dtype in _INTEGERS and type(x) is Tensor:
        return shapes.fake_tensor_converter.from_real_tensor(shapes, x.clone(), make_constant=True)
    if x.device.type == "cpu":
        return shapes.from_tensor(x) if x.is_leaf else shapes.from_tensor(x.detach()).requires_grad_()
    with shapes:
        empty = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    if isinstance(x, nn.Parameter):
        return nn.Parameter(empty, x.requires_grad)
    return empty.requires_grad_(x.requires_grad)


class _Nowhere(StoragePlace):
    """The place of storages that have no numbers."""

    def write(self, storage: torch.UntypedStorage, stream: Any) -> int:
        return 0

    def read(self, key: Any, storage: torch.UntypedStorage) -> None:
        pass

    def drop(self, key: Any, size: int) -> None:
        pass


class FollowingPager(Pager):
    """Chooses what leaves, as the pager does, and moves nothing."""

    has_numbers = False

    def __init__(self) -> None:
        super().__init__("meta")
        self._place = _Nowhere()
        self.of_thread = threading.local()

    @property
    def propagates(self) -> bool:
        """Whether this thread runs an operator only to learn the shapes of its results."""
        return getattr(self.of_thread, "propagates", False)

    def begin(self, keys: Iterable[int], changes: bool, call: Paged) -> dict[int, Any]:
        return {} if self.propagates else super().begin(keys, changes, call)

    def end(self, results: Iterable[Tensor], given: Sequence[int], used: dict[int, Any], call: Paged) -> None:
        if not self.propagates:
            super().end(results, given, used, call)

    def _may_leave(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "meta"

    def _fill(self, page: Any, storage: torch.UntypedStorage) -> None:
        pass

    def _empty(self, storage: torch.UntypedStorage) -> None:
        pass


class _Watch:
    """Sees the operators of all parts, and of the caller."""

    def __init__(self, pager: FollowingPager) -> None:
        self.memory, self.peak, self.with_scratch, self.operations = TensorMemory(), 0, 0, 0
        self._pager = pager

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An operator has made a result."""
        if not self._pager.propagates:
            self.count(made := fake_tensors((result,)))
            taken = self.memory.now - self._pager.away + scratch_bytes(func, args, made)
            self.with_scratch = max(self.with_scratch, taken)
            self.operations += operations_of(func, args, kwargs, result)

    def count(self, made: Sequence[Tensor]) -> None:
        """Takes what an operator has made into account."""
        self.memory.count(made)
        self.peak = max(self.peak, self.memory.now - self._pager.away)


@contextlib.contextmanager
def shapes_uncounted(of_thread: threading.local) -> Iterator[None]:
    """DTensor runs an operator on whole tensors without numbers to learn the shapes of results: not counted, as
    ``of_thread.propagates`` says meanwhile."""
    propagate: Any = ShardingPropagator._propagate_tensor_meta_non_cached

    def uncounted(propagator: Any, schema: Any) -> Any:
        of_thread.propagates = True
        try:
            return propagate(propagator, schema)
        finally:
            of_thread.propagates = False

    with substituted(ShardingPropagator, _propagate_tensor_meta_non_cached=uncounted):
        yield
