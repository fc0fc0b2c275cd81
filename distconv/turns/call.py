"""A call of a model whose parts are computed in turn: it is given, and gives, plain whole tensors."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from distconv.model.containers import Containers
from distconv.model.direct.border import fitting
from distconv.model.direct.parameters import in_use
from distconv.model.direct.where import where
from distconv.model.images import refuse_images
from distconv.model.shard_gather import to_shards
from distconv.tensors.dtensors import wrap
from distconv.tensors.mesh import placements
from distconv.tensors.plain_tensors import plain
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer.local_part import local_as
from distconv.turns.gradients import SECOND, Source, Totals, anchor, of_part
from distconv.turns.module_state import ModuleState
from distconv.turns.pager import Paging, pager_of
from distconv.turns.parts import Parts
from distconv.turns.random_numbers import RandomNumbers
from distconv.turns.surroundings import Surroundings
from distconv.turns.wholes import Wholes


def is_cut(parts: Parts, inputs: Sequence[Tensor]) -> bool:
    """Whether one of the inputs of a call has a dim that is cut. ValueError where one should have, and lacks it."""
    layouts = [placements(parts.meshes[0], x.dim()) for x in inputs]
    return any(placement.is_shard() for layout in layouts for placement in layout)


def call_in_turn(parts: Parts, memory: int | None, module: nn.Module, args: Any, kwargs: Any) -> Any:
    """What a module gives, computed part by part. Recorded by autograd as one function.

    ``memory``: the most bytes of tensors of the parts on the device; what is more, leaves it meanwhile.
    """
    given = tree_map_only(Tensor, plain, (args, kwargs))
    for number, value in enumerate(given[0], 1):
        refuse_images(value, f"input {number} of {type(module).__name__}.forward", parts.meshes[0])
    call = _Call(parts, memory, module, given)
    outside = Containers((args, kwargs), call.given[0])
    if not call.tensors:
        call.compute()
    else:
        made = _InTurn.apply(call, *call.tensors)
        for key, whole in zip(call.wholes.made, made, strict=True):
            assert whole is call.wholes.made[key]
    outside.give_back()
    return call.results[0]


class _Call:
    """One call: what each part begins with, and what is left of it until backward."""

    def __init__(self, parts: Parts, memory: int | None, module: nn.Module, given: Any) -> None:
        self.parts, self.module = parts, module
        self._pager = None if memory is None else pager_of(parts.device_type, memory)
        self.surroundings = Surroundings.now(parts.device_type)
        # What the model puts into lists and dicts goes to the copies that the first part was given, and from there on.
        self.given = [tree_map(lambda x: x, given) for _ in range(parts.count)]
        self._module_state = ModuleState(list(module.modules()), parts.count)
        self.wholes = Wholes(parts.count)
        self.results: list[Any] = []
        self._totals = Totals()
        self._inputs: list[Tensor] = []
        self._parameters: list[Tensor] = []
        if torch.is_grad_enabled():
            leaves = [x for x in tree_leaves(given) if isinstance(x, Tensor) and x.requires_grad]
            self._inputs = list({id(x): x for x in leaves}.values())
            self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._gradients: list[dict[int, Tensor]] = [{} for _ in range(parts.count)]
        """By part: the gradients of the inputs."""

    @property
    def tensors(self) -> list[Tensor]:
        """All that gradients are asked of."""
        return [*self._inputs, *self._parameters]

    def compute(self) -> None:
        """Forward, part by part."""
        versions = [(p, p._version) for p in self.module.parameters() if not p.is_inference()]
        if self._pager is not None:
            self._pager.new_call()
        self.results = self._run(self._forward, self.surroundings, self.wholes)
        if self._pager is not None and not self.tensors:
            self._pager.release_all()
        elif self._pager is not None:
            held = [module.__dict__ for module in self.module.modules()]
            for x in tree_leaves((self.results[0], self.given[0], [list(of.values()) for of in held])):
                if isinstance(x, Tensor):
                    self._release(x)
        if any(p._version != version for p, version in versions):
            raise UnsupportedOperation(
                f"parts in turn: {type(self.module).__name__} changes a parameter in forward, which every part would do"
                " again; accepted: models that change buffers"
            )

    def _run(self, work: Callable[[int], Any], surroundings: Surroundings, wholes: Wholes) -> list[Any]:
        """What every part gives; ``wholes`` are filled. Each part draws the caller's random numbers, which then go on
        behind the first part's.
        """

        def within_limit(part: int) -> Any:
            with contextlib.nullcontext() if self._pager is None else Paging(self._pager):
                return work(part)

        numbers = RandomNumbers(self.parts.count, self.parts.device_type)
        with in_use(list(self.module.parameters())):
            results = self.parts.run(within_limit, (self._module_state, numbers), surroundings)
        numbers.hand_over()
        if self.parts.mail is not None:
            wholes.share(self.parts.mail)
        return results

    def _release(self, x: Tensor) -> None:
        """A tensor that a part has made goes to the caller."""
        if self._pager is not None:
            self._pager.release(x)

    def _forward(self, part: int) -> Any:
        of_part.totals = self._totals
        numbers = {id(x): number for number, x in enumerate(self._inputs)}
        entered: dict[int, Tensor] = {}

        def enter(x: Tensor) -> Tensor:
            if id(x) not in entered:
                entered[id(x)] = self._entered(part, x, numbers.get(id(x)))
            return entered[id(x)]

        given = self.given[part]
        args, kwargs = tree_map_only(Tensor, enter, given)
        containers = Containers(given, (args, kwargs))
        result = nn.Module.__call__(self.module, *args, **kwargs)
        del args, kwargs
        entered.clear()

        def whole(x: Any) -> Any:
            return self.wholes.of(part, x)

        result = tree_map(lambda x: _leaving(x, whole), result)
        containers.give_back(lambda item: tree_map(lambda x: _leaving(x, whole), item))
        self._module_state.settle(part, whole)
        return result if part == 0 else None

    def _entered(self, part: int, x: Tensor, number: int | None) -> Tensor:
        """A part's of an input; its gradient is kept, where it has a number."""
        mesh = self.parts.meshes[part]
        if number is None:
            return to_shards(x.detach(), mesh)
        layout = placements(mesh, x.dim())
        place = where(mesh, layout, x.shape)

        def take(grads: Sequence[Tensor | None]) -> None:
            if grads[0] is not None:
                self._gradients[part][number] = fitting(grads[0], place)

        (made,) = Source.apply(anchor(), lambda: (to_shards(x.detach(), mesh),), take)
        return made

    def backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The gradients of `tensors`, part by part, from those of all wholes."""
        keys = dict(zip(self.wholes.made, grads, strict=True))
        wholes = Wholes(self.parts.count, zero=True)

        def back(part: int) -> None:
            outputs, given = [], []
            for key, y in self.wholes.parts[part].items():
                grad = keys[key]
                if grad is not None:
                    outputs.append(y)
                    given.append(
                        wrap(local_as(grad, y.device_mesh, y.placements), y.device_mesh, y.placements, y.shape)
                    )
            self.wholes.parts[part].clear()
            if outputs:
                torch.autograd.backward(outputs, given)
            for number in sorted(self._gradients[part]):
                wholes.of(part, self._gradients[part].pop(number), number)

        self._run(back, dataclasses.replace(self.surroundings, grad=False), wholes)
        found = [wholes.made.get(number) for number in range(len(self._inputs))]
        return found + self._totals.take(self._parameters, self._release, self.parts.ranks)


def _leaving(x: Any, whole: Any) -> Any:
    """What leaves a part: whole tensors, also in objects of data classes."""
    if isinstance(x, DTensor):
        return whole(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        fields = {each.name: getattr(x, each.name, None) for each in dataclasses.fields(x)}
        for name, value in fields.items():
            changed = tree_map(lambda item: _leaving(item, whole), value)
            if any(isinstance(leaf, DTensor) for leaf in tree_leaves(value)):
                object.__setattr__(x, name, changed)
    return x


class _InTurn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        call.compute()
        made, parts = call.wholes.made, call.wholes.parts
        ctx.mark_non_differentiable(*(x for key, x in made.items() if not any(key in part for part in parts)))
        return tuple(made.values())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedOperation(SECOND)
        return None, *ctx.call.backward(grads)
