"""Computes a function of modules once more in backward, with what it read at first; and a call that ran in parts once
more, whole, where gradients of its gradients are asked for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from distconv.agreement.samples import SampledElements
from distconv.fitting.outer_state import OuterState
from distconv.rules.normalization.running import of_modules
from distconv.turns.methods import forward_replaced
from distconv.turns.random_numbers import RandomNumbers
from distconv.turns.surroundings import Surroundings
from distconv.turns.turning import not_in_turn

CHANGED = (
    "one of the variables needed for gradient computation has been modified by an inplace operation: {what} of a call"
    " that --memory computes again in backward"
)

ASSIGNED = (
    "distconv: --memory: {what} of a call, which is computed again in backward, has been given other values by its"
    " .data since; accepted: before the call, or behind backward"
)


class Again:
    """Computes a function once more in backward. Is made before the first call; attributes are as of `computed_again`.

    Raises:
        RuntimeError: when it is called, where an input or a parameter has been changed in place since, or has got other
            memory (``.data =``). In one process backward reads its new values beside activations of the former ones.
    """

    def __init__(
        self, function: Callable[..., Any], modules: Sequence[nn.Module], changed: Sequence[Tensor], given: Any
    ) -> None:
        self._function = function
        clones = {id(x): x.detach().clone() for x in changed}
        self._states = [_State(each, clones) for module in modules for each in module.modules()]
        self._outer = OuterState(modules)
        self._attention = _cur_sdpa_kernel_backends()  # each kernel saves tensors of its own
        inputs = [x for x in tree_leaves(given) if isinstance(x, Tensor) and not x.is_inference()]
        self._parameters = [p for module in modules for p in module.parameters()]
        self._read = [(x, x._version, _storage(x), "an input") for x in inputs]
        self._read += [(p, p._version, _storage(p), "a parameter") for p in self._parameters]
        self._elements = _elements(self._parameters)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for x, version, storage, what in self._read:
            if x._version != version:
                raise RuntimeError(CHANGED.format(what=what))
            if storage is not None and storage._cdata != getattr(_storage(x), "_cdata", None):
                raise RuntimeError(ASSIGNED.format(what=what))
        if self._elements != _elements(self._parameters):
            raise RuntimeError(ASSIGNED.format(what="a parameter"))
        with contextlib.ExitStack() as around:
            for state in self._states:
                around.enter_context(state.in_place())
            around.enter_context(self._outer.in_place())
            around.enter_context(sdpa_kernel(self._attention))
            around.enter_context(not_in_turn())
            return self._function(*args, **kwargs)


def _storage(x: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor on this rank."""
    with torch._C.DisableTorchFunction():
        try:
            return getattr(x, "_local_tensor", x).untyped_storage()
        except (NotImplementedError, RuntimeError):  # a kind of tensor without a storage
            return None


_samples = WeakIdKeyDictionary()
"""By the first of some parameters: the elements of these that are looked at."""


def _elements(parameters: Sequence[Tensor]) -> list[Any]:
    """Some elements of parameters on a processor. Those on a GPU are not read, as it would have to be waited for."""
    found = [p for p in parameters if type(p) is nn.Parameter and p.device.type == "cpu"]
    if not found:
        return []
    with torch._C.DisableTorchFunction():
        data = [p.detach() for p in found]
        samples = _samples.setdefault(found[0], SampledElements())
        samples.of(data, [*map(id, found)], [*map(Tensor.data_ptr, data)])
        return samples.read()


class _State:
    """The attributes, parameters, buffers and children of one module, as they are now.

    ``clones``: by id, those of buffers that the call changes.
    """

    def __init__(self, module: nn.Module, clones: Mapping[int, Tensor]) -> None:
        self._module = module
        self._attributes = dict(vars(module))
        self._parameters, self._buffers = dict(module._parameters), dict(module._buffers)
        self._children = dict(module._modules)
        self._flags = [(p, p.requires_grad) for p in self._parameters.values() if p is not None]
        self._clones = {name: clones[id(x)] for name, x in self._buffers.items() if id(x) in clones}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """A context in which the module has this state again; of buffers that the call changes it has copies."""
        attributes = {name: x for name, x in self._attributes.items() if not (name in _APART or "_hooks" in name)}
        copies = {name: x.clone() for name, x in self._clones.items()}
        flags = [(p, not flag) for p, flag in self._flags if p.requires_grad != flag]
        # A model that runs on ranks, or in parts, has other dicts in backward than in forward.
        with (
            _with_values(vars(self._module), attributes),
            _with_values(self._module._modules, self._children),
            _with_values(self._module._parameters, self._parameters),
            _with_values(self._module._buffers, {**self._buffers, **copies}),
            of_modules([*copies.values()]),
        ):
            for p, flag in flags:
                p.requires_grad_(not flag)
            try:
                yield
            finally:
                for p, flag in flags:
                    p.requires_grad_(flag)


_APART = "_parameters", "_buffers", "_modules", "forward"
_NOTHING = object()


@contextlib.contextmanager
def _with_values(of: dict[str, Any], values: Mapping[str, Any]) -> Iterator[None]:
    """A context in which a dict has these values, too."""
    before = {name: of.get(name, _NOTHING) for name, x in values.items() if of.get(name, _NOTHING) is not x}
    of.update(values)
    try:
        yield
    finally:
        for name, x in before.items():
            if x is _NOTHING:
                of.pop(name, None)
            else:
                of[name] = x


def whole_again(
    buffers: Sequence[str], device: str, noticed: Callable[[], None], module: nn.Module, args: Any, kwargs: Any
) -> Callable[[], Any]:
    """A function that computes a call as plain torch does, with the random numbers and the autocast of now.

    Args:
        buffers: the names of those that the call changes; they stay as they are.
        device: the kind of the module's device.
        noticed: is called at each such computation.
    """
    changed = [module.get_buffer(name) for name in buffers]
    again = Again(nn.Module.__call__, [module], changed, (args, kwargs))
    forward = vars(module).get("forward")  # that of a method which is called in place of the module
    surroundings, numbers = Surroundings.now(device), RandomNumbers(1, device)

    def compute() -> Any:
        noticed()
        now = RandomNumbers(1, device)
        numbers.hand_over()
        try:
            with contextlib.nullcontext() if forward is None else forward_replaced(module, forward):
                return surroundings.run(lambda: again(module, *args, **kwargs))
        finally:
            now.hand_over()

    return compute
