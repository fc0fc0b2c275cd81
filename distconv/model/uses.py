"""The tensors that functions are given in place of parameters during one forward pass, and the way of their gradients.

For each parameter there is a plain tensor of this rank, the root, whose gradient goes to a bucket
(`distconv.model.gradients`), and a DTensor or activation of the root, which functions get. All of them have the
parameter's memory. So if the program changes the parameter, all its uses see that, as in one process, and if it gives
the parameter other memory, they get that too.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from distconv.agreement.samples import checksum
from distconv.model.direct.activation import activation
from distconv.model.direct.graphs import note_saved
from distconv.model.direct.operands import ParameterOperand, arriving
from distconv.model.direct.parameters import used
from distconv.model.direct.paths import running
from distconv.model.direct.shares import use as use_parameter
from distconv.model.fully_sharded import is_fully_sharded, some_fully_sharded
from distconv.model.gradients import Bucket, BucketPlan, bucket_plans, new_bucket, new_bucket_plans
from distconv.model.homes import home, local_part
from distconv.model.parameter_gathers import AT_ONCE, Gathers, State, WholeParameter
from distconv.model.scattered_gradients import FullBucket
from distconv.rules.operands.own_parts import apply, has_copies, rebind
from distconv.tensors import hooks

_TENSOR, _SEVERAL = operator.attrgetter("tensor"), operator.attrgetter("several")


class Uses:
    """Maps each parameter to a DTensor on its mesh, made at first use; other tensors to themselves.

    ``direct``: to an activation in place of the DTensor; direct paths may also ask for the operand. ``apart``: ids of
    parameters each of which gets its gradient as soon as the functions behind its first use have had their backward.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: list[Tensor],
        meshes: Sequence[DeviceMesh],
        direct: bool,
        apart: Collection[int] = (),
    ) -> None:
        self._model, self.parameters = model, parameters
        # By id: a tensor's hash is one, found by way of Python. The model keeps its parameters.
        self.meshes = dict(zip(map(id, parameters), meshes, strict=True))
        self._direct = direct
        self._made: dict[int, ParameterOperand] = {}
        self._before: dict[int, list[ParameterOperand]] = {}  # By parameter: its operands until it was changed.
        self._sources: dict[int, tuple[Tensor, Bucket, int]] = {}
        """By trained parameter: the tensor that passes its gradient on, the bucket for it, and its number there."""
        self.given_out: set[int] = set()  # The ids of parameters and buffers whose `.data` the model has read.
        self.copies: list[tuple[Tensor, Tensor, Tensor]] = []
        """Sharded parameters, the copies that other libraries have of them, and the copies' checksums."""
        self.gathers = Gathers(model, self.meshes) if some_fully_sharded(parameters) else None
        self._gathered: list[int] = []  # The keys of operands that were gathered, the latest last.
        self._late = not torch.is_grad_enabled()  # Whether some trained parameter may lack a source.
        if not self._late:
            together = [pair for pair in zip(parameters, meshes, strict=True) if id(pair[0]) not in apart]
            self._late = len(together) < len(parameters)
            self._enter(bucket_plans(model, [x for x, _ in together], [mesh for _, mesh in together]))

    def _enter(self, plans: Sequence[BucketPlan]) -> None:
        for plan in plans:
            bucket = FullBucket(plan) if plan.is_full else new_bucket(plan)
            with torch._C.DisableTorchFunctionSubclass():  # the class of a parameter in use has another `detach`
                tensors = bucket.sources(plan.parameters)
            sources = zip(tensors, repeat(bucket), range(len(plan.parameters)), strict=False)
            self._sources.update(zip(map(id, plan.parameters), sources, strict=True))

    def include(self, parameters: Sequence[Tensor], mesh: DeviceMesh) -> list[Tensor]:
        """Takes in parameters that are none of the model's, or that it has made while it runs. Returns the new ones."""
        new = [x for x in parameters if id(x) not in self.meshes]
        self.meshes.update((id(x), mesh) for x in new)
        self.parameters += new
        self._late |= bool(new)
        if self.gathers is None and some_fully_sharded(new):
            self.gathers = Gathers(self._model, self.meshes)
        return new

    def given(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The arguments of a function with operands in place of parameters, in lists too."""
        return used(args, self), kwargs and dict(zip(kwargs, used(list(kwargs.values()), self), strict=True))

    def __call__(self, parameter: Tensor) -> Tensor:
        operand = self.operand(parameter)
        if operand is None:
            return parameter
        if operand.given is None:
            with torch._C.DisableTorchFunctionSubclass():
                share = functools.partial(use_parameter, place=operand.place)
                root = operand.root
                operand.given = activation(root, operand.place, share) if self._direct else share(root)
                operand.several = True
        return operand.given

    def operand(self, parameter: Tensor) -> ParameterOperand | None:
        """The operand of a parameter; None for other tensors."""
        key = id(parameter)
        found = self._made.get(key)
        if found is not None:
            unchanged = found.version is None or found.tensor._version == found.version
            if found.stream is not None and found.gathered is not None:
                found.stream.hand_over(found.tensor)
                unchanged &= key not in self.given_out and found.gathered.is_current(parameter)
            if unchanged and (not self._late or found.tensor.requires_grad or not torch.is_grad_enabled()):
                return found
            self._set_aside(key)
        elif key not in self.meshes:
            return None
        return self._new_operand(key, parameter)

    def _new_operand(self, key: int, parameter: Tensor) -> ParameterOperand:
        if key not in self._sources:
            with torch._C.DisableTorchFunctionSubclass():
                if not (self._late and torch.is_grad_enabled() and parameter.requires_grad):
                    return self._untrained_operand(key, parameter)
                self._enter(new_bucket_plans({parameter: self.meshes[key]}))
        tensor, bucket, index = source = self._sources[key]
        place = bucket.plan.places[index]
        if bucket.plan.is_full:
            gather = functools.partial(self._gather, parameter)
            root = arriving(*source, lambda part: apply(WholeParameter, part, gather))
            return self._kept(key, ParameterOperand(root, place, gathered=State(parameter)))
        made = self._made[key] = ParameterOperand(tensor, place, source, key not in self._before)
        return made

    def _untrained_operand(self, key: int, parameter: Tensor) -> ParameterOperand:
        place = home(parameter, self.meshes[key])
        if is_fully_sharded(parameter):
            return self._kept(key, ParameterOperand(self._gather(parameter), place, gathered=State(parameter)))
        made = self._made[key] = ParameterOperand(local_part(parameter), place)
        return made

    def _gather(self, parameter: Tensor) -> Tensor:
        assert self.gathers is not None, "one of its parameters is fully sharded"
        if id(parameter) in self.given_out:
            self.gathers.forget(parameter)
        return self.gathers.whole(parameter)  # type: ignore[arg-type]

    def _kept(self, key: int, made: ParameterOperand) -> ParameterOperand:
        """Keeps an operand that was gathered until others have been; returns it."""
        self._made[key] = made
        self._gathered.append(key)
        if len(self._gathered) > AT_ONCE:
            self._set_aside(self._gathered[0])
        return made

    def _set_aside(self, key: int) -> None:
        made = self._made.pop(key, None)
        if key in self._gathered:
            self._gathered.remove(key)
            if made is not None and self.gathers is not None:
                self.gathers.release(made.versions(), made.place.shape)
        elif made is not None:
            self._before.setdefault(key, []).append(made)

    def has_copies(self, x: Tensor) -> bool:
        """Whether functions have computed with a copy of a parameter or buffer, which later writes do not reach."""
        return any(map(has_copies, self._aliases(id(x))))

    def _aliases(self, key: int) -> list[Tensor]:
        """The tensors of this call that have a parameter's memory."""
        source = self._sources.get(key)
        aliases = [] if source is None else [source[0]]
        made = (self._made[key],) if key in self._made and key not in self._gathered else ()
        return [*aliases, *(x for each in (*self._before.get(key, ()), *made) for x in each.tensors())]

    def end(self) -> None:
        """Ends the call. Notes which tensors represent its parameters, as autograd's graphs may have saved them."""
        if self.gathers is not None:
            while self._gathered:
                self._set_aside(self._gathered[0])
            self.gathers.end()
        if not torch.is_grad_enabled():
            return
        made = self._made.values()
        note_saved(self._made, map(_TENSOR, made))
        several = itertools.compress(self._made, map(_SEVERAL, made))
        more = [(key, self._aliases(key)) for key in {*self._before, *several}]
        for at in range(max([len(aliases) for _, aliases in more], default=0)):  # each parameter once in a list
            pairs = [(key, aliases[at]) for key, aliases in more if at < len(aliases)]
            note_saved([key for key, _ in pairs], [x for _, x in pairs])

    def renew(self, parameter: Tensor) -> None:
        """Called when a parameter itself was changed: gives the tensors that represent it its memory again."""
        key = id(parameter)
        if self.gathers is not None:
            self.gathers.forget(parameter)
        with torch._C.DisableTorchFunctionSubclass():
            own, trained = local_part(parameter), parameter.requires_grad
        aliases = self._aliases(key)
        like = aliases[0] if aliases else own
        if (own.shape, own.dtype, own.device) != (like.shape, like.dtype, like.device) or (
            key in self._sources
        ) != trained:
            self._sources.pop(key, None)
            self._made.pop(key, None)
            self._before.pop(key, None)
            self._late = True
        elif key in self._gathered or _memory(own) != _memory(like):
            for alias in aliases:
                rebind(alias, own)
            self._set_aside(key)


def _note_copy(x: DTensor, copy: Tensor) -> None:
    """Records that another library was given a copy of a distributed tensor, if that is a parameter."""
    memory = x._local_tensor.untyped_storage()._cdata
    for parameter in () if running.uses is None else running.uses.parameters:
        if isinstance(parameter, DTensor) and parameter._local_tensor.untyped_storage()._cdata == memory:
            running.uses.copies.append((parameter, copy, checksum(copy)))


hooks.after_copies.append(_note_copy)


def _memory(x: Tensor) -> tuple[Any, ...]:
    """A tensor's storage, offset and strides; not its address, as fake tensors have none."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.stride()
