"""A model's call in turn: its parts are computed one after another; arguments and results are plain, whole tensors."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from distconv.model.call_inputs import Containers, refuse_images
from distconv.model.direct.parameters import in_use
from distconv.model.running import inside
from distconv.tensors.plain_tensors import plain
from distconv.tensors.refusal import UnsupportedOperation
from distconv.turns.call_lock import call_lock
from distconv.turns.gathered_parameters import GatheredParameters
from distconv.turns.gradients import SECOND_DERIVATIVE, Totals, of_thread, written_by_autograd_alone
from distconv.turns.inputs import Inputs
from distconv.turns.module_state import ModuleState
from distconv.turns.output import PartOutput
from distconv.turns.pager import pager_of
from distconv.turns.pages import Paged
from distconv.turns.paging import Paging
from distconv.turns.parameter_values import ParameterValues
from distconv.turns.parts import Parts
from distconv.turns.random_numbers import RandomNumbers
from distconv.turns.reach import Reach, is_constant
from distconv.turns.surroundings import Surroundings
from distconv.turns.wholes import HOST, InTurn, Wholes, laid_out


def call_in_turn(
    parts: Parts,
    memory: int | None,
    module: nn.Module,
    args: Any,
    kwargs: Any,
    on_host: bool = False,
    call: Callable[..., Any] | None = None,
    again: Callable[[], Any] | None = None,
) -> Any:
    """The module's result, computed part by part. Autograd records one function.

    ``memory``: the most bytes of the parts' tensors on the device; others leave it until they are read. ``on_host``:
    each part's piece of the result is copied to the host as soon as it is computed; UnsupportedOperation where autograd
    would record that. ``call``: a function that each part calls with the module and its arguments, in its place.
    ``again``: computes the whole call once more, for gradients of its gradients; None: these are refused.
    """
    given = tree_map_only(Tensor, plain, (args, kwargs))
    for number, value in enumerate(given[0], 1):
        refuse_images(value, f"input {number} of {type(module).__name__}.forward", parts.meshes[0])
    gathered = GatheredParameters(module)
    with gathered.in_place():
        in_turn = _Call(parts, memory, gathered, module, given, on_host, call, again)
        outside = Containers((args, kwargs), in_turn.given[0])
        with torch.no_grad():
            in_turn.compute()
    if in_turn.tensors:
        made = InTurn.apply(in_turn, *in_turn.tensors)
        assert all(map(operator.is_, made, in_turn.wholes.made.values()))
    outside.give_back()
    return in_turn.take_result()


class _Call:
    """One call: the arguments and the state of each part, and the graphs of the parts until backward."""

    def __init__(
        self,
        parts: Parts,
        memory: int | None,
        gathered: GatheredParameters,
        module: nn.Module,
        given: Any,
        on_host: bool,
        call: Callable[..., Any] | None,
        again: Callable[[], Any] | None,
    ) -> None:
        self.parts, self.module, self._on_host, self._gathered = parts, module, on_host, gathered
        self._call_module, self._again = call, again
        self._keys: list[int | None] = []  # Of the whole tensors among the leaves of the result.
        self._pager = None if memory is None else pager_of(parts.device_type)
        # Makes a tensor of a part the caller's. A method of the call would be in a cycle with it.
        self._release: Callable[[Tensor], None] = (lambda _: None) if self._pager is None else self._pager.release
        self._paged = Paged(memory or 0)
        self.surroundings = Surroundings.now(parts.device_type)
        # Lists and dicts are copied for each part; what the first part puts into its own, the caller gets in the end.
        self.given = [tree_map(lambda x: x, given) for _ in range(parts.count)]
        self._reach = Reach(module, given)
        shared = [*self._reach.parameters, *self._reach.constant]
        self._values = ParameterValues(shared, parts.count, self._release)
        self.wholes = Wholes(parts.count)
        self.results: list[Any] = []
        self._totals = Totals()
        self._leaves: list[Tensor] = []
        self._inputs = Inputs(parts, module, given, self._reach.differentiable)
        self._others = self._reach.others(module) if torch.is_grad_enabled() else []
        self._parameters = self._trained() if torch.is_grad_enabled() else []
        if on_host and (self._inputs.tensors or self._parameters):
            raise UnsupportedOperation(
                f"parts in turn: results on the host of a call of {type(module).__name__} that autograd records;"
                " accepted: a call under torch.no_grad() or torch.inference_mode(), or results on the device"
            )
        self._module_state = ModuleState(self._reach, parts.count, self._values.shares_memory, self._inputs.replica)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors whose gradients this call computes: inputs, parameters, and leaves of the graph that it makes."""
        return [*self._inputs.used, *map(self._gathered.sharded, self._parameters), *self._leaves]

    def _trained(self) -> list[Tensor]:
        return [p for p in (*self.module.parameters(), *self._others) if p.requires_grad]

    def compute(self) -> None:
        """Runs forward, part by part."""
        if self._pager is not None:
            self._paged = self._pager.new_call(self._paged.limit, self._kind())
        self.results = self._run(self._forward, self.surroundings, self.wholes)
        self._totals.is_forward = False
        self._leaves = self.wholes.take_leaves()
        if self.surroundings.grad:
            self._parameters = list({id(p): p for p in (*self._parameters, *self._trained())}.values())
            self._totals.same = self._module_state.new_parameters()
            self._inputs.find_used(list(self.wholes.parts[0].values()))
        if self._pager is not None and not self.tensors:
            self._pager.release_all(self._paged)
        elif self._pager is not None:
            parameters = self.module.parameters()  # of which forward may have made some
            for x in (*tree_leaves((self.results[0], self.given[0])), *self._module_state.left, *parameters):
                if isinstance(x, Tensor):
                    self._release(x)

    def take_result(self) -> Any:
        """The result. The call forgets it: autograd's node refers to the call, so that both would be in a cycle."""
        result, self.results, self.given = self.results[0], [], []
        if self._again is not None:
            numbers = {id(x): key for key, x in self.wholes.made.items()}
            self._keys = [numbers.get(id(x)) for x in tree_leaves(result)]
        if self._on_host:
            result = tree_map_only(Tensor, Tensor.cpu, result)
        self.wholes.forget()
        return result

    def _kind(self) -> tuple[object, ...]:
        """A key that is equal for calls whose parts are expected to do the same."""
        shapes = (x.shape for x in tree_leaves(self.given[0]) if isinstance(x, Tensor))
        return id(self.module), str(self.parts.partition), self.surroundings.grad, *shapes

    def _run(self, work: Callable[[int], Any], surroundings: Surroundings, wholes: Wholes) -> list[Any]:
        """The results of ``work`` of each part, which fills ``wholes``. All parts draw the same random numbers; the
        caller goes on behind those of the first part."""

        def within_limit(part: int) -> Any:
            inside.watch, inside.others = values.watch, self._others  # also for checkpoints in backward
            of_thread.totals, inside.refused = self._totals, None
            try:
                with self._paging(), values.watch():
                    self._module_state.enter(part)
                    result = work(part)
                    if inside.refused is not None:
                        raise inside.refused
                    self._module_state.settle(part, lambda x: wholes.of(part, self._values.checked_result(x)))
                    return result
            finally:
                del inside.watch, inside.others, inside.refused, of_thread.totals  # which keep the model's graph alive

        values = self._values
        values.begin()
        count = self.parts.count
        numbers, output = RandomNumbers(count, self.parts.device_type, self._reach.generators), PartOutput(count)
        try:
            with in_use([*self.module.parameters(), *self._others]):
                results = self.parts.run(within_limit, (self._module_state, values, numbers, output), surroundings)
        except BaseException as error:
            values.put_back()
            with self._paging():
                self._module_state.put_back()
            if (unshared := self._unshared()) is not None and isinstance(error, Exception):
                raise unshared from error
            raise
        finally:
            if self._pager is not None:
                self._pager.finish_all()
        numbers.hand_over()
        failure = self._take_values()
        if self.parts.mail is not None:
            wholes.share(self.parts.mail, failure)
        elif failure is not None:
            raise failure
        return results

    def _paging(self) -> Any:
        """A context in which the pager copies back the tensors that operators read."""
        return contextlib.nullcontext() if self._pager is None else Paging(self._pager, self._paged)

    def _unshared(self) -> UnsupportedOperation | None:
        """The error where a part has changed an object that all parts share."""
        what = self._module_state.unshared()
        return None if what is None else UnsupportedOperation(f"parts in turn: {type(self.module).__name__} {what}")

    def _take_values(self) -> UnsupportedOperation | None:
        """Gives the caller the values that parts have written to parameters; returns the error where parts differ."""
        name = type(self.module).__name__
        if (unshared := self._unshared()) is not None:
            self._values.put_back()
            return unshared
        with self._paging():  # state of parts may have left the device
            unseen, disputed = self._values.unseen(), self._values.disputed() or self._module_state.disputed()
        if unseen is None and disputed is None:
            self._values.agree()
            self._gathered.write_back(self._values.changed())
            self._module_state.take_registered()
            return None
        self._values.put_back()
        if unseen is not None:
            return UnsupportedOperation(
                f"parts in turn: the parameter {unseen} was changed in a call of {name}, and not by a function of torch"
                " that parts can do once; accepted: in-place functions, .data =, and new parameters, in forward"
            )
        return UnsupportedOperation(
            f"parts in turn: {name} changes {disputed} in its call, and not all parts write the same; accepted: what is"
            " written does not depend on how many parts there are"
        )

    def _forward(self, part: int) -> Any:
        entered: dict[int, Tensor] = {}

        def enter(x: Tensor) -> Tensor:
            if id(x) not in entered:
                entered[id(x)] = self._inputs.shard(part, x)
            return entered[id(x)]

        given = self.given[part]
        args, kwargs = tree_map_only(Tensor, enter, given)
        containers = Containers(given, (args, kwargs))
        result = (self._call_module or nn.Module.__call__)(self.module, *args, **kwargs)
        del args, kwargs
        entered.clear()

        to_caller = conversion = self._module_state.conversion(part, functools.partial(self.wholes.of, part))
        if self._on_host:
            to_caller = self._module_state.conversion(part, functools.partial(self.wholes.of, part, device=HOST))
        result = tree_map(to_caller.value, result)
        containers.give_back(lambda item: tree_map(conversion.value, item))
        return result if part == 0 else None

    def differentiable_gradients(self, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """As `backward`, recorded by autograd: of the whole call, which is computed once more."""
        by_key = {key: grad for key, grad in zip(self.wholes.made, grads, strict=True) if grad is not None}
        if self._again is None or self._leaves or not by_key.keys() <= set(self._keys):
            raise UnsupportedOperation(SECOND_DERIVATIVE)
        results = dict(zip(self._keys, tree_leaves(self._again()), strict=True))
        return torch.autograd.grad(
            [results[key] for key in by_key], self.tensors, [*by_key.values()], create_graph=True, allow_unused=True
        )

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of `tensors`, part by part, from the gradients of the whole results."""
        if not any(self.wholes.parts):
            raise RuntimeError("parts in turn: a second backward; accepted: after one with retain_graph=True")
        self._gathered.check()
        with call_lock.taken(), self._gathered.in_place(), written_by_autograd_alone(self._parameters):
            return self._backward(grads)

    def _backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        keep = torch._C._autograd._get_current_graph_task_keep_graph()
        keys = dict(zip(self.wholes.made, grads, strict=True))
        wholes = Wholes(self.parts.count, zero=True, first=len(self._inputs.tensors))
        gone = self._module_state.gone()
        for each in (self._reach, self._values, self._module_state):
            each.forget(gone)
        left = filter(is_constant, self._module_state.left)
        self._values.add([(type(self.module).__name__, x) for x in left])
        self._module_state.begin()

        def back(part: int) -> None:
            found = [(y, keys[key]) for key, y in self.wholes.parts[part].items()]
            given = [(y, laid_out(grad, y)) for y, grad in found if grad is not None]
            if not keep:
                self.wholes.parts[part].clear()
            if given:
                torch.autograd.backward([y for y, _ in given], [grad for _, grad in given], retain_graph=keep)
            self._inputs.take_gradients(part, wholes)
            wholes.take_gradients(self.wholes.leaves[part], part)

        self._run(back, dataclasses.replace(self.surroundings, grad=False), wholes)
        for x in (*self._module_state.left, *self.module.parameters()):
            self._release(x)
        totals = self._totals.take(self._parameters, self._release, self.parts.ranks, self._gathered.sharded)
        return self._inputs.gradients(wholes) + totals + wholes.gradients(len(self._leaves))
