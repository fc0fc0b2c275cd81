"""Predicts the memory of a call in turn, and the bytes that it moves, from the shapes of its tensors.

The call runs as it would, with its parts and with the choice of what leaves the device, but with tensors without
numbers (`ShapesOnly`). Caches of the program's functions (`functools.lru_cache`) must not keep what it makes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distconv import settings
from distconv.settings.partition import Partition
from distconv.tensors.autograd_nodes import nodes_of
from distconv.tensors.memory import TensorMemory, shapes_uncounted
from distconv.transfer.tracing import shapes_followed
from distconv.turns.call import call_in_turn
from distconv.turns.computation import Undo
from distconv.turns.copied_models import drop_gradients, without_numbers
from distconv.turns.group import PendingCollectives
from distconv.turns.operations import add_work, scratch_bytes
from distconv.turns.output import muted
from distconv.turns.pager import Pager, pager_replaced
from distconv.turns.pages import Paged
from distconv.turns.parts import parts_of
from distconv.turns.places import StoragePlace
from distconv.turns.real_tensors import numbers_kept
from distconv.turns.shapes_only import ShapesOnly, fake_tensors
from distconv.turns.value_kinds import FOREIGN
from distconv.turns.work import Followed, Work
from distconv.turns.writes import KeepsNumbers


def call_kind(module: nn.Module, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The kind of a module's call: calls of one kind take the same time and memory, so one of them is followed. The
    first item is whether autograd records the call, the next ones are not about the inputs."""
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in (*module.parameters(), *inputs))
    device = next((p.device.type for p in module.parameters()), "cpu")
    autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    forward = vars(module).get("forward")  # of a method that is called in place of the module
    return trained, module.training, autocast, getattr(forward, "func", None), *((x.shape, x.dtype) for x in inputs)


_CACHED: Any = type(functools.lru_cache(len))


class StateBefore:
    """What a call may change, as it is now: global variables, attributes of classes, its arguments, and tensors. It is
    put back whenever the call has been followed. Functions of the program that remember results
    (`functools.lru_cache`) forget those without numbers. To find all this takes some 100 ms.
    """

    def __init__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        functions = [each for each in gc.get_referrers(_CACHED) if type(each) is _CACHED]  # faster than all objects
        self._remembering = [each for each in functions if (each.__module__ or "").partition(".")[0] not in FOREIGN]
        # A function may count its calls, of which a followed call makes some.
        wrapped = [getattr(each, "__wrapped__", None) for each in self._remembering]
        self._undo = Undo(module, (args, kwargs), tensors=False, functions=wrapped)

    @contextlib.contextmanager
    def put_back(self, trained: bool) -> Iterator[None]:
        """A context in which the call is followed, with its backward if it is ``trained``. What it prints does not
        appear."""
        results = [_results(each) for each in self._remembering]
        known = [dict(each) for each in results]
        try:
            self._undo.lend_iterators()
            with torch.inference_mode(False), torch.set_grad_enabled(trained), numbers_kept(), muted():
                yield
        finally:
            for each, own, before in zip(self._remembering, results, known, strict=True):
                new = [key for key in own if key not in before]
                if new and not before:
                    each.cache_clear()
                else:  # A function of few results may come to forget one too early.
                    deque(map(own.__delitem__, new), maxlen=0)
            self._undo.put_back()


def _results(remembering: Any) -> dict[Any, Any]:
    """The results that a function remembers. It goes on without those that are taken out."""
    return next(x for x in gc.get_referents(remembering) if type(x) is dict and x is not vars(remembering))


_surveyed: weakref.WeakKeyDictionary[nn.Module, set[Any]] = weakref.WeakKeyDictionary()
"""By module: the kinds of calls that were followed to choose their chains."""


def choose_chains(module: nn.Module, args: Any, kwargs: Any, partition: Partition) -> None:
    """Where layers compute in chains (`--halo chain`), chooses the chains before the first call of a kind, by following
    that call.

    Raises what the call raises.
    """
    if not settings.value("halo"):
        return
    kind = partition, *call_kind(module, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)])
    known = _surveyed.setdefault(module, set())
    if kind not in known:
        known.add(kind)
        with StateBefore(module, args, kwargs).put_back(torch.is_grad_enabled()):
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

    Tensors of other devices, or of none (meta), are followed as if they were on a processor.

    ``memory``: the limit of the parts' tensors. ``ranks``: a partition of ranks, each with such parts, of which the
    first is followed. ``chained``: whether chains of layers are chosen first. ``call``: as of `call_in_turn`. Raises
    what the call raises.
    """
    if chained and partition is not None and ranks is None:
        choose_chains(module, args, kwargs, partition)
    pager = FollowingPager()
    shapes = ShapesOnly()
    copied, args, kwargs, known = without_numbers(module, args, kwargs, shapes)
    pager.count(known)
    whole = pager.memory.now
    is_whole = partition is None or (partition.ranks == 1 and ranks is None)
    parts = None if partition is None or is_whole else parts_of(partition, "cpu", imagined=ranks)
    if parts:
        drop_gradients(copied)
    pending = parts.pending if parts else PendingCollectives()
    moved, sent = pending.moved, pending.sent
    shapes.seen = pager.see
    with shapes_uncounted(pager.of_thread), pager_replaced(pager), shapes_followed(), shapes:
        if parts:
            y = call_in_turn(parts, memory, copied, args, kwargs, call=call)
        else:
            with KeepsNumbers():
                y = copied(*args, **kwargs)
        if backward:
            backward_of_sum(y)
    moved, sent = pending.moved - moved, pending.sent - sent
    storages = [x.untyped_storage() for x in tree_leaves(y) if isinstance(x, Tensor)]
    results = sum({storage._cdata: storage.nbytes() for storage in storages}.values())
    return Followed(pager.peak, whole, results, pager.written, pager.read, moved, sent, pager.work, pager.with_scratch)


def backward_of_sum(results: Any, as_of_loss: bool = True) -> None:
    """Runs the backward of the sum of all results that require gradients; of complex ones the real parts are added up.

    ``as_of_loss``: the results' gradients have memory, as those of a loss; else each is one number, expanded.
    """
    found = [x for x in tree_leaves(results) if isinstance(x, Tensor) and x.requires_grad]
    sums = [(x * 1 if as_of_loss else x).sum() for x in found]
    if sums:
        total = sum(x.real if x.is_complex() else x for x in sums)
        with _gradients_kept(total):  # type: ignore[arg-type]
            total.backward()  # type: ignore[union-attr]


@contextlib.contextmanager
def _gradients_kept(total: Tensor) -> Iterator[None]:
    """A context in which backward leaves the gradients of tensors of the program, such as of a global variable, as they
    are, and calls none of their hooks: of these there are no copies, and their gradients would have no numbers."""
    leaves = [node.variable for node in nodes_of([total.grad_fn]) if hasattr(node, "variable")]
    before = [(x, x.grad) for x in leaves if type(x) in (Tensor, nn.Parameter)]
    hooks = [h for x, _ in before for h in (x._backward_hooks, x._post_accumulate_grad_hooks) if h]
    kept = [dict(each) for each in hooks]
    for x, _ in before:
        x.grad = None
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, own in zip(hooks, kept, strict=True):
            each.update(own)
        for x, grad in before:
            x.grad = grad


class FollowingPager(Pager):
    """Chooses what leaves, as the pager does, and moves nothing. It counts the memory and the work of all parts, and of
    the caller.
    """

    has_numbers = False

    def __init__(self) -> None:
        super().__init__("meta")
        self._place = StoragePlace()
        self.of_thread = threading.local()
        self.memory, self.peak, self.with_scratch, self.work = TensorMemory(), 0, 0, Work()

    @property
    def propagates(self) -> bool:
        """Whether this thread runs an operator only to learn the shapes of its results."""
        return getattr(self.of_thread, "propagates", False)

    def begin(self, keys: Sequence[int], changes: bool, call: Paged, copied: int = 0) -> dict[int, Any]:
        return {} if self.propagates else super().begin(keys, changes, call, copied)

    def end(self, results: Iterable[Tensor], given: Sequence[int], used: dict[int, Any], call: Paged) -> None:
        if not self.propagates:
            super().end(results, given, used, call)

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Is called after each operator."""
        if not self.propagates:
            before = self.memory.now
            self.count(made := fake_tensors((result,)))
            taken = self.memory.now - self.away + scratch_bytes(func, args, made)
            self.with_scratch = max(self.with_scratch, taken)
            add_work(self.work, func, args, kwargs, result, self.memory.now > before)

    def count(self, made: Sequence[Tensor]) -> None:
        """Counts new tensors."""
        self.memory.count(made)
        self.peak = max(self.peak, self.memory.now - self.away)

    def _may_leave(self, storage: torch.UntypedStorage) -> bool:
        return storage.device.type == "meta"

    def _fill(self, page: Any, storage: torch.UntypedStorage) -> None:
        pass

    def _empty(self, storage: torch.UntypedStorage) -> None:
        pass
