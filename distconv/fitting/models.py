"""`distconv.fit` and `distconv.in_turn`: models keep within a limit of memory, or compute the parts of their inputs.

Within a limit, how calls of a kind are computed is chosen at the first one.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from distconv import settings
from distconv.fitting.again import whole_again
from distconv.fitting.answers import AnswersOfModels, guessed_text
from distconv.fitting.beside import NONE, Beside, Chosen, Others, optimizer_bytes
from distconv.fitting.called import Call, Limit
from distconv.fitting.choice import Fit, fit_line
from distconv.fitting.kinds import EXACT, MOST, CallKind, kind_of_call, known_of_larger
from distconv.fitting.ranks import Ranks, extents_of
from distconv.fitting.retention import computation_of
from distconv.fitting.sharded_parameters import bytes_here
from distconv.fitting.timeline import Timeline
from distconv.fitting.workspaces import workspaces_within
from distconv.private_names import FOLLOWED, IN_TURN, require
from distconv.settings.partition import read_memory
from distconv.tensors.gathering.memory import free_here
from distconv.turns.call_lock import PATIENCE, call_lock
from distconv.turns.computation import Computation
from distconv.turns.heap import return_freed
from distconv.turns.turning import not_in_turn, read_plan, turn
from mucudnn.process import Recent

M = TypeVar("M", bound=nn.Module)

SHARE = 0.9  # The share of a device's free memory that is used.

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


def in_turn(model: M, parts: str, *, memory: str | float | None = None, results: str | None = None) -> M:
    """Lets a model compute the parts of its inputs one after another, in this process and on its device. Exact.

    Inputs, results and gradients are plain, whole tensors. Where the model, or a module in it, is called from outside
    of the model, its inputs are cut, and each part computes until it needs a result of another part. The same holds for
    a call of the model's method decode, if it has one. If an input is in the host's memory and the model on a GPU, each
    part copies its own piece.

    Args:
        model: is changed in place; its parameters stay as they are.
        parts: axes and the parts along each, such as `"height=8"`. Accepted axes: sample, depth, height, width.
            With `"auto"`, `distconv.fit` chooses them, or another way to keep within the memory.
        memory: the most bytes, such as `"8GiB"`, that tensors of the parts take on the device, besides parameters,
            inputs, results, and the tensors of one operator. The least recently read tensors are moved to a
            file of the temporary folder, or from a GPU to pinned memory of the host. None: all stay on the device. With
            `"auto"` it is the limit of `distconv.fit`, by default the memory that the device has free.
        results: `"host"`: results are in the host's memory, into which each part's piece is copied as soon as it is
            computed; for calls without gradients. `"device"`: on the model's device. None: as `DISTCONV_RESULTS` says.

    Returns:
        The same model.

    Raises:
        ValueError: one line, for parts that are not accepted, here, and where an input lacks a dim that is to be cut.
        RuntimeError: one line, in a job of several ranks.
    """
    if parts == settings.AUTO:
        return fit(model, settings.AUTO if memory is None else memory, results=results)
    return turn(model, read_plan(parts, memory), results, "distconv.in_turn")


_of_process = Beside()  # Models that share a device share a limit.


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
        limit = None if memory == settings.AUTO else read_memory(memory)
        if limit == 0:
            raise ValueError(f"memory {memory!r}: accepted: auto, or bytes, such as 8GiB")
        self._limit = Limit(str(memory), math.inf if limit is None and memory != settings.AUTO else limit)
        self._ranks, self._free = ranks, 0
        self._partition = None if ranks is None else ranks.partition
        self.shown: Callable[[str, Sequence[Fit], float], None] | None = None
        self._known: weakref.WeakKeyDictionary[nn.Module, Recent[CallKind, Chosen]] = weakref.WeakKeyDictionary()
        self._beside = Beside() if beside is None else beside
        self._answers = AnswersOfModels()
        self._calls: weakref.WeakKeyDictionary[nn.Module, Recent[CallKind, int]] = weakref.WeakKeyDictionary()
        self._differentiated: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # Gradients of whose gradients are wanted.

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, inputs: Sequence[Tensor], device: str) -> Computation:
        """Chooses how a call is computed; ``inputs`` are the tensors among its arguments."""
        known = self._known.setdefault(module, Recent(MOST))
        kind = kind_of_call(module, args, kwargs, inputs, len(known))
        call = Call(module, args, kwargs, inputs, device, kind.how[0], self._answers.asked(module), self._partition)
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
        if parts_of_differentiated:
            chosen.choose(self._agreed(call, others))
        elif not chosen.choose_again(others):
            chosen.add(self._agreed(call, chosen.least_others(others)))
        elif chosen.answered:
            answer = self._agreed(call, others, chosen)
            if answer.guessed or answer.fit != chosen.fit:
                chosen.choose(answer)
            else:
                chosen.confirm()
        found = chosen.fit

        def smaller(why: str) -> Computation:
            def within_less() -> Chosen:
                self._limit.report(module, f"ran out of memory, once more: {why}")
                return self._fit(call, chosen.others, int(SMALLER * min(found.peak, chosen.limit)))

            with not_in_turn():  # to follow a call calls a copy of the module
                chosen.choose(within_less() if self._ranks is None else self._ranks.agreed(within_less))
            return computation_of(chosen.fit, device)

        computation = computation_of(found, device)
        computation = computation._replace(ended=lambda result: self._beside.note(chosen, result))
        if chosen.guessed:
            computation = computation._replace(within=self._answers.noting(module, chosen))
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

    def _agreed(self, call: Call, others: Others, guessed: Chosen | None = None) -> Chosen:
        """The result of `_fit`; on several ranks that of the first one, collective over them.

        ``guessed``: a choice for guessed numbers, which stays if the computed ones are equal.
        """

        def choose() -> Chosen:
            if guessed is not None and not self._answers.differ(call.module, guessed.guessed):
                return replace(guessed, guessed={}, after={}, past=[])
            return self._fit(call, others)

        if self._ranks is None:
            return choose()
        self._ranks.shard(call.module)
        if self._limit.bytes is None:
            self._free = self._ranks.free(call.device)
        return self._ranks.agreed(choose)

    def _fit(self, call: Call, others: Others, most: float = math.inf) -> Chosen:
        """The best way for a call within what the limit leaves beside others, and within ``most`` bytes."""
        module = call.module
        has_parameters = next(iter(module.parameters()), None) is not None
        given = sum(x.numel() * x.element_size() for x in call.inputs)
        if not has_parameters and self.shown is None and SMALL * given <= self._left(call, given, others):
            return Chosen(Fit(0, 1.0), most)
        call = replace(call)  # The state that is put back is that of now.
        timeline = call.timeline(self._limit)
        if timeline is None:
            return Chosen(Fit(0, 1.0), most, guessed=call.asked.guessed)
        guessed, timeline.later = call.asked.guessed, others.later
        limit = min(self._left(call, timeline.initial, others), most)
        ways = self._ways(call, timeline, limit)
        if self._limit.bytes is None and self._ranks is None:
            left = self._left(call, timeline.initial, others)
            if left < limit:  # Choosing has taken memory, too.
                limit = left
                ways = ways if ways[0].peak <= limit else self._ways(call, timeline, limit)
        found = ways[0]
        if self.shown is not None:
            self.shown(type(module).__name__, ways, limit)
        elif has_parameters or not found.fits or found.slower > 1:
            self._limit.report(module, fit_line(found, timeline, limit) + guessed_text(guessed))
        shared = bytes_here((*module.parameters(), *module.buffers()))
        shared += sum(x.numel() * x.element_size() for x in call.inputs if x.grad_fn is not None)
        alone = limit * (1 + others.same) + others.kept
        workspaces = workspaces_within(timeline, found, limit)
        own = timeline.initial + timeline.results
        return Chosen(found, alone, others, own, shared, timeline.repeated(), workspaces, guessed)

    def _ways(self, call: Call, timeline: Timeline, left: float) -> list[Fit]:
        """The ways to compute a call of which all tensors may take ``left`` bytes, the best first."""
        extents = extents_of(call.inputs) if self._ranks is None else self._ranks.extents_of(call.inputs)
        extents = {} if call.module in self._differentiated else extents
        return call.ways(self._limit, timeline, left, extents, self.shown is not None)

    def _note_differentiated(self, module: nn.Module) -> None:
        if module not in self._differentiated:
            self._differentiated.add(module)
            why = "gradients of its gradients are asked for (create_graph=True); later calls run without parts"
            self._limit.report(module, f"is computed once more, whole, as {why}")

    def _left(self, call: Call, present: int, others: Others) -> float:
        """Bytes of the limit for the tensors of a call, ``present`` of which are on the device already. Calls of one
        kind whose graphs are alive at the same time have equal shares."""
        kept, missing = optimizer_bytes({call.module, *self._beside.models()})
        if self._limit.bytes is None:
            free = free_here(call.device) if self._ranks is None else self._free
            left: float = int(SHARE * free) + present
        elif call.device == "cuda" and torch.cuda.is_available():
            left = self._limit.bytes - max(torch.cuda.memory_allocated() - present, 0)
        else:
            left = self._limit.bytes - kept - others.kept
        return (left - missing) / (1 + others.same)
