"""`distconv.fit`: models keep within a limit of memory; how calls of a kind are computed is chosen at the first one."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from distconv import settings
from distconv.fitting.again import whole_again
from distconv.fitting.beside import NONE, Beside, Chosen, Others, optimizer_bytes
from distconv.fitting.choice import Fit, fit_line, largest_within, ways_to_fit, with_others
from distconv.fitting.following import AS_FOLLOWED, followed
from distconv.fitting.kinds import EXACT, MOST, CallKind, kind_of_call, known_of_larger
from distconv.fitting.prices import MOST as MOST_MOVED
from distconv.fitting.prices import measured_prices
from distconv.fitting.ranks import Ranks, extents_of
from distconv.fitting.retention import caller_retaining, computation_of
from distconv.fitting.sharded_parameters import bytes_here, sharded_bytes
from distconv.fitting.timeline import Timeline
from distconv.fitting.ways import SegmentWay
from distconv.fitting.workspaces import workspaces_within
from distconv.model.direct.chains.choice import Prices
from distconv.private_names import FOLLOWED, IN_TURN, require
from distconv.settings.partition import Partition, read_memory
from distconv.tensors.gathering.memory import free_here
from distconv.turns.call_lock import PATIENCE, call_lock
from distconv.turns.computation import Computation
from distconv.turns.following import Followed, followed_as, remembering_functions
from distconv.turns.gradients import BUCKET_BYTES
from distconv.turns.heap import return_freed
from distconv.turns.one_part import parts_within
from distconv.turns.parts import stacks_of
from distconv.turns.turning import not_in_turn, turn
from mucudnn.lazily import uncollected
from mucudnn.process import Recent, print_line
from mucudnn.timing.progress import bar

M = TypeVar("M", bound=nn.Module)

SHARE = 0.9  # The share of a device's free memory that is used.

BESIDE = 24 << 20  # Bytes of a processor's free memory for the plans of parts and their threads.

SMALLER = 0.8  # Where memory did not suffice, the call is made once more within this share of what it took.

HEAP_FACTOR = 2  # The heap of a process may be so many times as large as its tensors, as it keeps freed blocks.

WATCHED = 3  # The first calls of a kind that can be made once more: to note what they change takes milliseconds.

SMALL = 64  # A module without parameters runs whole if so many times its inputs fit the limit.


def fit(model: M, memory: str | float = "auto", *, results: str | None = None) -> M:
    """Lets a model compute within a limit of memory, exactly, in the least time that is predicted for it.

    At the first call with inputs of new shapes, the call is followed by the shapes of its tensors. If not all of it
    fits, segments of modules are computed again in backward, or the tensors that they save are moved off the device
    until then, or parts of the inputs are computed one after another (`distconv.in_turn`). A line on stderr says which
    way was chosen. If memory does not suffice after all, the changes that the call has made are undone, and it is made
    once more within less.

    Args:
        model: is changed in place; its parameters stay as they are.
        memory: the most bytes that all tensors may take on the device, such as "24GiB": parameters, gradients, the
            optimizer's state, inputs, results, and all that is computed. "auto": the memory that the device has free at
            the time of the call, less a tenth, besides the model's own tensors.
        results: as of `distconv.in_turn`.

    Returns:
        The same model.

    Raises:
        ValueError: one line, for a limit that is not accepted.
        RuntimeError: one line, in a job of several ranks, which have ``distconv run --partition ... --memory ...``.
    """
    require(IN_TURN, FOLLOWED)
    return turn(model, (Fitting(memory, beside=_of_process), None), results, "distconv.fit")


_of_process = Beside()  # Models that share a device share a limit.


class _Call(NamedTuple):
    """A call of a model; ``inputs``: its tensors, ``trained``: whether autograd records it."""

    module: nn.Module
    args: Any
    kwargs: Any
    inputs: Sequence[Tensor]
    device: str
    trained: bool
    remembering: Sequence[Any] | None = None  # As of `followed_as`.


class Fitting:
    """Chooses for each kind of call how it keeps within a limit. ValueError, one line, for a text that is no limit.

    Args:
        memory: the most bytes, of one process or of each rank; or "auto".
        ranks: the ranks that compute each call; None: one process does.
        beside: the other calls and models that count.

    Attributes:
        shown: called instead of printing a line, with the name of a called model, all ways to compute the call, the
            best first, and the bytes of the limit that are left for it.
    """

    def __init__(self, memory: str | float, ranks: Ranks | None = None, beside: Beside | None = None) -> None:
        self._limit: float | None = None  # Bytes; None: the free memory.
        if memory != settings.AUTO:
            limit = read_memory(memory)
            if limit == 0:
                raise ValueError(f"memory {memory!r}: accepted: auto, or bytes, such as 8GiB")
            self._limit = math.inf if limit is None else limit
        self._text, self._ranks, self._free = str(memory), ranks, 0
        self._partition = None if ranks is None else ranks.partition
        self.shown: Callable[[str, Sequence[Fit], float], None] | None = None
        self._known: weakref.WeakKeyDictionary[nn.Module, Recent[CallKind, Chosen]] = weakref.WeakKeyDictionary()
        self._beside = Beside() if beside is None else beside
        self._calls: weakref.WeakKeyDictionary[nn.Module, Recent[CallKind, int]] = weakref.WeakKeyDictionary()
        self._differentiated: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # Gradients of whose gradients are wanted.

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, inputs: Sequence[Tensor], device: str) -> Computation:
        """Chooses how a call is computed; ``inputs`` are the tensors among its arguments."""
        known = self._known.setdefault(module, Recent(MOST))
        kind = kind_of_call(module, args, kwargs, inputs, len(known))
        call = _Call(module, args, kwargs, inputs, device, kind.how[0])
        others = self._beside.others(module, known.get(kind))
        if self._ranks is not None:  # They must choose at the same calls.
            others = NONE if self._beside.is_alone else Others(*self._ranks.most(others, device))
        if kind not in known:
            # A smaller call runs whole where a larger one does; of many sizes, such as those of a data set's images,
            # the first ones are followed.
            larger = [each for each in known_of_larger(kind, known) if each.fit.fits and each.fit.partition is None]
            sufficient = [each for each in larger if not each.fit.ways or len(known) >= EXACT]
            with call_lock.taken(PATIENCE):  # Following a call puts back what other threads may change.
                if kind not in known:
                    is_known = sufficient and self.shown is None
                    known[kind] = replace(sufficient[0], after={}) if is_known else self._agreed(call, others)
                    if not is_known:
                        known[kind].workspaces.apply(known[kind])
            processes = 1 if self._partition is None else self._partition.ranks
            if device == "cpu" and free_here(device) < HEAP_FACTOR * known[kind].fit.peak * processes:
                return_freed()  # A decoder's step then takes 1.8 times as long, and its process is 0.6 times as large.
        chosen = known[kind]
        parts_of_differentiated = chosen.fit.partition is not None and module in self._differentiated
        if parts_of_differentiated or not chosen.suits(others):
            chosen.choose(self._agreed(call, others))
        found = chosen.fit

        def smaller(why: str) -> Computation:
            def within_less() -> Chosen:
                name = type(module).__name__
                print_line(f"distconv: --memory {self._text}: {name} ran out of memory, once more: {why}")
                return self._fit(call, chosen.others, int(SMALLER * min(found.peak, chosen.limit)))

            with not_in_turn():  # to follow a call calls a copy of the module
                chosen.choose(within_less() if self._ranks is None else self._ranks.agreed(within_less))
            return computation_of(chosen.fit, device)

        computation = computation_of(found, device)
        computation = computation._replace(ended=lambda result: self._beside.note(chosen, result))
        is_in_parts = found.partition is not None and call.trained
        if self._ranks is None and is_in_parts and chosen.repeated is not None:
            noticed = functools.partial(self._note_differentiated, module)
            computation = computation._replace(again=functools.partial(whole_again, chosen.repeated, device, noticed))
        calls = self._calls.setdefault(module, Recent(MOST))
        calls[kind] = calls.get(kind, 0) + 1
        if not found.peak:
            return computation
        if self._ranks is not None:  # Their own call returns no result here.
            computation = computation._replace(call=computation.call or nn.Module.__call__, gather=self._ranks.gather)
        return computation if calls[kind] > WATCHED else computation._replace(smaller=smaller)

    def _agreed(self, call: _Call, others: Others) -> Chosen:
        """The result of `_fit`; on several ranks that of the first one, collective over them."""
        if self._ranks is None:
            return self._fit(call, others)
        self._ranks.shard(call.module)
        if self._limit is None:
            self._free = self._ranks.free(call.device)
        return self._ranks.agreed(lambda: self._fit(call, others))

    def _fit(self, call: _Call, others: Others, most: float = math.inf) -> Chosen:
        """The best way for a call within what the limit leaves beside others, and within ``most`` bytes."""
        module = call.module
        has_parameters = next(module.parameters(), None) is not None
        given = sum(x.numel() * x.element_size() for x in call.inputs)
        if not has_parameters and self.shown is None and SMALL * given <= self._left(call, given, others):
            return Chosen(Fit(0, 1.0), most)
        call = call._replace(remembering=remembering_functions())
        timeline = self._timeline(call)
        if timeline is None:
            return Chosen(Fit(0, 1.0), most)
        timeline.later = others.later
        limit = min(self._left(call, timeline.initial, others), most)
        ways = self._ways(call, timeline, limit)
        if self._limit is None and self._ranks is None:
            left = self._left(call, timeline.initial, others)
            if left < limit:  # Choosing has taken memory, too.
                limit = left
                ways = ways if ways[0].peak <= limit else self._ways(call, timeline, limit)
        found = ways[0]
        if self.shown is not None:
            self.shown(type(module).__name__, ways, limit)
        elif has_parameters or not found.fits or found.slower > 1:
            print_line(f"distconv: --memory {self._text}: {fit_line(type(module).__name__, found, timeline, limit)}")
        shared = bytes_here((*module.parameters(), *module.buffers()))
        shared += sum(x.numel() * x.element_size() for x in call.inputs if x.grad_fn is not None)
        alone = limit * (1 + others.same) + others.kept
        workspaces = workspaces_within(timeline, found, limit)
        own = timeline.initial + timeline.results
        return Chosen(found, alone, others, own, shared, timeline.repeated(), workspaces=workspaces)

    def _timeline(self, call: _Call) -> Timeline | None:
        """The call, followed in one process; None, and a line, where that is not possible without numbers."""
        try:
            with uncollected(), followed_as(call.trained, call.module, call.args, call.kwargs, call.remembering):
                prices = self._prices(call.module, call.device)
                return followed(call.module, call.args, call.kwargs, call.trained, prices, self._partition)
        except Exception as error:
            self._cannot_follow(call.module, "runs whole", error)
            return None

    def _cannot_follow(self, module: nn.Module, what: str, error: Exception) -> None:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        name = type(module).__name__
        print_line(f"distconv: --memory {self._text}: {name} {what}, as it cannot be followed: {why}")

    def _ways(self, call: _Call, timeline: Timeline, limit: float) -> list[Fit]:
        """The ways to compute a call of which all tensors may take ``limit`` bytes, the best first."""
        module, args, kwargs, inputs, device, trained, remembering = call
        ranks = self._ranks
        gradients = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad) if trained else 0
        summed = 0 if ranks is None or not trained else gradients + BUCKET_BYTES
        with bar(None, "distconv: choosing what fits") as advance:

            def in_parts(
                parts: Partition, limit: float, first: int, ways: Sequence[SegmentWay]
            ) -> tuple[int, Followed] | None:
                advance()
                beside = stacks_of(parts, device) + BESIDE * (self._limit is None and device == "cpu")
                beside += (1 + trained) * sharded_bytes(module)  # Parts have whole parameters and gradients, too.
                try:
                    followed = followed_as(trained, module, args, kwargs, remembering)
                    with uncollected(), followed, settings.within_call(AS_FOLLOWED):
                        caller = caller_retaining(ways, device)
                        taken = parts_within(module, args, kwargs, parts, trained, self._partition, caller)
                        within = functools.partial(with_others, taken, timeline.later, summed)
                        memory, found = largest_within(within, max(first - beside, 1), limit - beside)
                except Exception as error:
                    self._cannot_follow(module, f"does not run in parts {parts} in turn", error)
                    return None
                return memory, replace(found, with_scratch=found.with_scratch + beside)

            prices, every = self._prices(module, device), self.shown is not None
            extents = extents_of(inputs) if ranks is None else ranks.extents_of(inputs)
            extents = {} if module in self._differentiated else extents
            return ways_to_fit(timeline, limit, extents, in_parts, prices, device, gradients, every)

    def _note_differentiated(self, module: nn.Module) -> None:
        if module not in self._differentiated:
            self._differentiated.add(module)
            print_line(
                f"distconv: --memory {self._text}: {type(module).__name__} is computed once more, whole, as gradients"
                " of its gradients are asked for (create_graph=True); later calls run without parts"
            )

    def _prices(self, module: nn.Module, device: str) -> Prices:
        dtypes = [p.dtype for p in module.parameters() if p.is_floating_point()]
        sixteenth = int(min(free_here(device) if self._limit is None else self._limit, 1 << 40)) // 16
        size = min(MOST_MOVED, 1 << max(sixteenth.bit_length() - 1, 20))
        return measured_prices(device, dtypes[0] if dtypes else torch.float32, size)

    def _left(self, call: _Call, present: int, others: Others) -> float:
        """Bytes of the limit for the tensors of a call, ``present`` of which are on the device already. Calls of one
        kind whose graphs are alive at the same time have equal shares."""
        kept, missing = optimizer_bytes({call.module, *self._beside.models()})
        if self._limit is None:
            free = free_here(call.device) if self._ranks is None else self._free
            left: float = int(SHARE * free) + present
        elif call.device == "cuda" and torch.cuda.is_available():
            left = self._limit - max(torch.cuda.memory_allocated() - present, 0)
        else:
            left = self._limit - kept - others.kept
        return (left - missing) / (1 + others.same)
