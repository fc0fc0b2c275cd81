"""Gathers of fully sharded parameters: before each use, while the next one is already on its way, and in backward.

A gathered tensor is released two uses later. So autograd does not save it, but a record of which parameter it is
(`Regathered`), and backward gathers that again: with the value that the parameter has then, as in one process, where
autograd saves the parameter itself. For a view, such as a linear layer's transposed weight, autograd saves the data
that the parameter had. All ranks use the same parameters in the same order.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from distconv.model.direct.activation import version_of
from distconv.model.fully_sharded import division, format_of
from distconv.tensors.dtensors import wrap
from distconv.tensors.refusal import UnsupportedOperation
from distconv.transfer import group_calls
from distconv.transfer.stream import Stream

AT_ONCE = 2
"""How many gathered parameters are kept at a time."""

_OF_PARAMETERS = ("AliasBackward0", "_FinishBackward", "_LocalBackward")
"""Autograd's nodes of the tensors that represent a parameter. They share its data, so they are saved themselves."""


class _Gather:
    """A parameter that is being gathered, or has been; ``local``: this rank's part, if not the one that it has now."""

    def __init__(self, parameter: DTensor, local: Tensor | None = None) -> None:
        self.parameter, self.state = parameter, State(parameter)
        self._division, self._form = division(parameter), format_of(parameter)
        self._parts, self._work = self._division.gather((parameter._local_tensor if local is None else local).detach())
        self._stream = Stream(self._parts)
        self._whole: Tensor | None = None

    def _joined(self) -> Tensor:
        group_calls.wait(self._work)
        return self._division.whole(self._parts, self._form)

    def whole(self) -> Tensor:
        """The parameter, once all parts have arrived."""
        if self._whole is None:
            self._whole = self._stream.run(self._joined)
            del self._parts, self._work
            for key in [key for key, (storage, *_) in _storages.items() if storage.expired()]:
                del _storages[key]
            storage = StorageWeakRef(self._whole.untyped_storage())
            _storages[storage.cdata] = storage, self.parameter, (self._whole.shape, self._whole.stride())
        return self._stream.hand_over(self._whole)


class State:
    """The data and version of a parameter at some time. Without addresses, so that all ranks find the same changes."""

    __slots__ = ("_counts", "_local")

    def __init__(self, parameter: Any) -> None:
        self._local, self._counts = parameter._local_tensor, _counts(parameter)

    def is_current(self, parameter: Any) -> bool:
        """Whether the parameter has been neither changed nor replaced since, in the same pass."""
        return self._local is parameter._local_tensor and self._counts == _counts(parameter)

    def is_same_data(self, parameter: Any) -> bool:
        """Whether the parameter has been neither changed nor replaced since, in whatever pass."""
        return self._local is parameter._local_tensor and self._counts[1:] == _counts(parameter)[1:]


def _counts(parameter: Any) -> tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return torch._C._current_graph_task_id(), version_of(parameter), version_of(parameter._local_tensor)


_recent: dict[int, _Gather] = {}
"""Gathers by the id of the parameter, the latest last: of parameters in use, and of those that are used next."""

_storages: dict[int, tuple[StorageWeakRef, DTensor, tuple[Any, ...]]] = {}
"""The storages of gathered parameters by address: each with its parameter, and with shape and strides."""


@torch.no_grad()
def _begin(parameter: DTensor) -> _Gather:
    found = _recent.pop(id(parameter), None)
    if found is None or not found.state.is_current(parameter):
        with torch.inference_mode(False):
            found = _Gather(parameter)
    _recent[id(parameter)] = found
    return found


def _gathered(parameter: DTensor, following: DTensor | None) -> Tensor:
    """The whole parameter. The gather of the one that follows begins."""
    found = _begin(parameter).whole()
    if following is not None and following is not parameter:
        _begin(following)
    while len(_recent) > AT_ONCE + (following is not None):
        del _recent[next(iter(_recent))]
    return found


_orders: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[DTensor]]] = weakref.WeakKeyDictionary()
"""By model: its fully sharded parameters in the order in which its last call has used them."""


class Gathers:
    """The gathers of parameters in one call of a model."""

    def __init__(self, model: nn.Module, known: Collection[int]) -> None:
        """``known``: the ids of the parameters that the call uses."""
        self._model, self._known = weakref.ref(model), known
        self._before = _orders.get(model, [])
        _recent.clear()  # the program may have changed parameters since
        self._order: list[weakref.ref[DTensor]] = []
        self._released: list[tuple[weakref.ref[Tensor], int, torch.Size]] = []
        self._saved: Regathered | None = None

    def forget(self, parameter: Tensor) -> None:
        """Drops the gathered tensor of a parameter whose data may have changed."""
        _recent.pop(id(parameter), None)

    def whole(self, parameter: DTensor) -> Tensor:
        """The whole parameter, for a use that begins."""
        at, following = len(self._order), None
        self._order.append(weakref.ref(parameter))
        if at + 1 < len(self._before) and self._before[at]() is parameter:
            following = self._before[at + 1]()
            if id(following) not in self._known:  # no longer a parameter of the model; some ranks may not have it
                following = None
        with torch._C.DisableTorchFunctionSubclass():
            return _gathered(parameter, following).detach()

    def release(self, tensors: Iterable[tuple[Tensor, int]], shape: torch.Size) -> None:
        """Refuses changes, from now on, of tensors that functions were given for a parameter: they would be lost.

        ``tensors``: each with the version that it has if nobody has changed it.
        """
        self._released += [(weakref.ref(x), version, shape) for x, version in tensors]
        self._refuse_changes()

    def _refuse_changes(self) -> None:
        for reference, version, shape in self._released:
            x = reference()
            if x is not None and version_of(x) != version:
                raise UnsupportedOperation(
                    f"a view of a parameter {tuple(shape)} that is sharded along all axes was changed in place;"
                    " accepted: functions in place on the parameter itself, or on its .data"
                )

    def end(self) -> None:
        self._refuse_changes()
        model = self._model()
        if torch._C._current_graph_task_id() == -1 and model is not None:
            _orders[model] = self._order
        self._before, self._order, self._released = [], [], []
        _recent.clear()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A context in which autograd saves a `Regathered` for a gathered tensor, unless the program has set hooks."""
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            yield
            return
        with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda saved: saved()):
            yield

    def _pack(self, x: Tensor) -> Callable[[], Tensor]:
        found = regathered(x, self._saved)
        if found is None:
            if x.grad_fn is not None and x.grad_fn.name() not in _OF_PARAMETERS:
                x = x.detach()  # has the same version counter, but does not keep its own graph alive
            return functools.partial(_unchanged, x, version_of(x))
        self._saved = found
        return found


class Regathered:
    """Represents a gathered parameter, or a view of it, among the tensors that autograd saves. Called, gathers it."""

    def __init__(self, x: Tensor, own: Tensor, parameter: DTensor, is_view: bool, before: Regathered | None) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            self._parameter, self._version = parameter, version_of(parameter)
        self._geometry = own.storage_offset(), own.shape, own.stride()
        self._dtype, self._is_conj, self._is_neg = own.dtype, own.is_conj(), own.is_neg()  # view_as_complex, conj, imag
        # If the program assigns other data to the parameter, a view keeps the old memory.
        self._local = parameter._local_tensor if is_view else None
        self._layout = (x.device_mesh, x.placements, x.shape) if isinstance(x, DTensor) else None
        if before is not None and before._parameter is parameter:
            before = before._before
        self._before: Regathered | None = before

    def _is_current(self) -> bool:
        """Whether the parameter still has the data that is to be gathered."""
        return self._local is None or self._local is self._parameter._local_tensor

    def __call__(self) -> Tensor:
        """The tensor, gathered again. The gather of the parameter that was saved before it begins."""
        if version_of(self._parameter) != self._version:
            raise _changed(self._parameter, version_of(self._parameter), self._version)
        before = self._before
        following = before._parameter if before is not None and before._is_current() else None
        if self._is_current():
            found = _gathered(self._parameter, following)
        else:
            found = _Gather(self._parameter, self._local).whole()
        own = torch.empty(0, dtype=self._dtype, device=found.device).set_(found.untyped_storage(), *self._geometry)
        own = own.conj() if self._is_conj else own
        own = -own if self._is_neg else own
        return own if self._layout is None else wrap(own, *self._layout)


def regathered(x: Tensor, before: Regathered | None = None) -> Regathered | None:
    """What autograd saves for a gathered parameter, or a view of it; None for another tensor.

    ``before``: what was saved before; backward begins to gather that one, too.
    """
    if not _storages:
        return None
    own = x._local_tensor if isinstance(x, DTensor) else x
    if own.layout is not torch.strided or torch._C._functorch.is_functorch_wrapped_tensor(own):
        return None
    found = _storages.get(own.untyped_storage()._cdata)
    if found is None or found[0].expired():
        return None
    is_view = (own.shape, own.stride()) != found[2] or _is_by_view(x)
    return Regathered(x, own, found[1], is_view, before)


def _is_by_view(x: Tensor) -> bool:
    """Whether autograd's graph has one of torch's views between a parameter and a tensor of its memory."""
    node = x.grad_fn
    while node is not None and not (node.name().endswith("Backward0") and node.name() != "AliasBackward0"):
        node = node.next_functions[0][0] if node.next_functions else None
    return node is not None


def _unchanged(x: Tensor, version: int) -> Tensor:
    if version_of(x) != version:
        raise _changed(x, version_of(x), version)
    return x


def _changed(x: Tensor, version: int, expected: int) -> RuntimeError:
    """Torch's own error for a saved tensor that was changed. Torch checks no versions of what hooks have packed."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation:"
        f" [{x.dtype} {list(x.shape)}] is at version {version}; expected version {expected} instead."
    )


class WholeParameter(torch.autograd.Function):
    """The whole of a parameter, from what represents this rank's part in autograd's graph. A hook gives the gradient to
    a bucket; backward passes zeros."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, gather: Callable[[], Tensor]) -> Tensor:
        ctx.like = source.new_zeros(()).expand(source.shape)
        return gather()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.like, None


def forget_gathered() -> None:
    """Drops all gathered tensors: the parameters may change."""
    _recent.clear()
