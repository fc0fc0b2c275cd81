"""`FakeTensorMode` in less time: tensors without numbers, for calls whose parts repeat operators on equal shapes.

The results of each operator on operands of given shapes are remembered. Views, and the results of many operators, are
made by torch's kernels for meta tensors, beside `FakeTensorMode`, whose own way takes several times as long.
"""

from __future__ import annotations

import enum
import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.utils._pytree import tree_leaves

from distconv.turns.asked_numbers import asked_here
from distconv.turns.data_dependent import (
    ASKING,
    has_masks,
    indices_without_masks,
    result_without_numbers,
)
from distconv.turns.real_tensors import keep_numbers
from distconv.turns.strides import corrected

Seen = Callable[[Any, Any, Mapping[str, Any], Any], None]
"""Called after an operator with the operator, its arguments, and its result."""


class _Kind(enum.Enum):
    """The kind of an operator's results: new tensors, its first argument, views, those of other operators of which it
    consists, such that depend on numbers, or one that torch has to find out."""

    NEW, FIRST, VIEW, COMPOSITE, ASKING, OTHER = range(6)


class _Made(NamedTuple):
    """A tensor with a storage of its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


class ShapesOnly(FakeTensorMode):
    """A mode in which tensors have no numbers. ``seen``: called after each operator, if given."""

    def __init__(self, seen: Seen | None = None) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.seen = seen
        self._asked = asked_here()
        self._attributes: dict[torch.device, dict[str, Any]] = {}
        self._of_thread = threading.local()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # Nothing is compiled in here; else torch would make sure of that at each operator.

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return args[0].fake_device
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            keep_numbers(func, args, kwargs)
        if getattr(self._of_thread, "is_within", False):  # an operator that torch takes apart
            return self._result(func, types, args, kwargs)
        self._of_thread.is_within = True
        try:
            result = self._result(func, types, args, kwargs)
        finally:
            self._of_thread.is_within = False
        if self.seen is not None and result is not NotImplemented:
            self.seen(func, args, kwargs, result)
        return result

    def may_turn_const(self, t: Tensor) -> bool:
        """Whether the numbers of a tensor are kept: of a single one, and of small tensors of integers."""
        integers = type(t) is Tensor and t.dtype in INTEGERS and t.layout is torch.strided and not t.is_meta
        return (integers and t.numel() <= MOST_MADE) or super().may_turn_const(t)

    def _empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> FakeTensor:
        return self._strided(shape, torch.empty(shape, device=_META).stride(), dtype, device)

    def _strided(
        self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> FakeTensor:
        return self._new(_Made(torch.Size(shape), tuple(strides), dtype, device))

    def _result(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        kind = _kind_of(func)
        if kind is _Kind.ASKING:
            if self._asked is not None and any(x.constant is None for x in fake_tensors(args)):
                return result_without_numbers(self._asked, self._empty, func._schema.name, args, kwargs)
            return super().__torch_dispatch__(func, types, args, kwargs)
        if func is _INDEX and self._asked is not None and has_masks(args[1]) and fake_tensors(args):
            args = args[0], indices_without_masks(self._asked, self._empty, *args)
        if kind is _Kind.OTHER or (kind is not _Kind.NEW and not (args and isinstance(args[0], FakeTensor))):
            return corrected(func, args, super().__torch_dispatch__(func, types, args, kwargs), self._strided)
        if kind is _Kind.COMPOSITE:
            with self:
                return func.decompose(*args, **kwargs)
        key = [func, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
        if not _describe(args, key) or not _describe(kwargs.items(), key) or (func is _INDEX and has_masks(args[1])):
            return super().__torch_dispatch__(func, types, args, kwargs)
        if kind is _Kind.VIEW:
            return self._of_meta(func, args, kwargs, args[0].fake_device)
        known = _known.get(found := tuple(key))
        if known is None:
            device = _device_of(args, kwargs) if func in _OF_META else None
            device = device if kwargs.get("device") in (None, device) else None
            if device is None:
                result = super().__torch_dispatch__(func, types, args, kwargs)
            else:
                result = self._of_meta(func, args, kwargs, device)
            result = corrected(func, args, result, self._strided)
            if len(_known) == MOST:
                _known.clear()
            _known[found] = _made_by(kind, result, args, kwargs)
            return result
        if known is _UNKNOWN:
            return super().__torch_dispatch__(func, types, args, kwargs)
        if kind is _Kind.FIRST:
            return args[0]
        return self._new(known) if isinstance(known, _Made) else tuple(x and self._new(x) for x in known)

    def _of_meta(self, func: Any, args: Any, kwargs: Any, device: torch.device) -> Any:
        """What torch's kernel for meta tensors makes."""
        if kwargs.get("device") is not None:
            kwargs = {**kwargs, "device": _META}
        with in_kernel_invocation_manager(self):
            made = func(*args, **kwargs)
        if isinstance(made, Tensor):
            return self._without_numbers(made, device)
        return type(made)(None if x is None else self._without_numbers(x, device) for x in made)

    def _new(self, made: _Made) -> FakeTensor:
        shape, stride, dtype, device = made
        return self._without_numbers(_EMPTY(shape, stride, dtype=dtype, device=_META), device)

    def _without_numbers(self, x: Tensor, device: torch.device) -> FakeTensor:
        """A `FakeTensor`, made in less time than by its constructor, which sets each attribute by itself."""
        attributes = self._attributes.get(device)
        if attributes is None:
            first = FakeTensor(self, x, device)
            self._attributes[device] = dict(vars(first))
            return first
        found: Any = Tensor._make_subclass(FakeTensor, x, False, dispatch_device=True, device_for_backend_keys=device)
        torch._C._set_throw_on_mutable_data_ptr(found)
        vars(found).update(attributes)
        return found


_known: dict[tuple[Any, ...], Any] = {}
"""Descriptions of operators' results; `_UNKNOWN` if torch has to find them out each time."""

MOST = 50_000  # Operators with their operands, some 500 bytes each.

INTEGERS = torch.int64, torch.int32, torch.bool
"""Types of tensors from whose numbers programs compute shapes, such as lengths, paddings and masks."""

MOST_NUMBERS = 4096  # The numbers of an integer tensor of the model, or of its arguments, that are kept.

MOST_MADE = 16 * MOST_NUMBERS  # The same of what functions make of these.

_UNKNOWN = object()
_META = torch.device("meta")
_EMPTY = torch.ops.aten.empty_strided.default
_DEVICE = torch.ops.prim.device.default
_INDEX, _UNSAFE_VIEW = torch.ops.aten.index.Tensor, torch.ops.aten._unsafe_view.default
_COMPOSITE = frozenset(
    {torch.ops.aten.to.dtype, *(getattr(torch.ops.aten, name).default for name in ("contiguous", "narrow", "reshape"))}
)
_NAMESPACES = "aten", "distconv"

_OF_META = frozenset(
    getattr(getattr(torch.ops.aten, name), overload)
    for overload, names in {
        "default": "_log_softmax _log_softmax_backward_data _softmax _softmax_backward_data addmm bmm cat clamp_min"
        " clone constant_pad_nd elu gelu gelu_backward hardswish hardtanh leaky_relu leaky_relu_backward"
        " linalg_vector_norm mm native_group_norm native_layer_norm native_layer_norm_backward new_empty"
        " new_full new_ones new_zeros relu roll rsqrt select_backward sigmoid sigmoid_backward silu"
        " silu_backward slice_backward sqrt stack sum tanh tanh_backward threshold_backward",
        "Tensor": "add div eq ge gt le lt mul ne sub",
        "Scalar": "eq ge gt le lt masked_fill ne",
        "dim_IntList": "sum",
        "dim": "mean",
        "Tensor_Scalar": "pow",
    }.items()
    for name in names.split()
)
"""Operators that make on one device, of numbers of whole precision, what they make of meta tensors."""

_WHOLE_PRECISION = torch.float32, torch.float64, torch.int64, torch.bool
_VALUES = int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format
_TAGS = torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view


@functools.lru_cache(maxsize=4096)
def _kind_of(func: Any) -> _Kind:
    if not isinstance(func, torch._ops.OpOverload):
        return _Kind.OTHER
    if func._schema.name in ASKING:
        return _Kind.ASKING
    if func.namespace not in _NAMESPACES or "lift" in func.name():
        return _Kind.OTHER
    if func is _INDEX:
        return _Kind.NEW  # but by masks
    if any(tag in func.tags for tag in _TAGS):
        return _Kind.OTHER
    if func is _UNSAFE_VIEW:
        return _Kind.VIEW
    if func.is_view:
        composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if not composite:
            return _Kind.VIEW
        return _Kind.COMPOSITE if func in _COMPOSITE else _Kind.OTHER
    if not func._schema.is_mutable:
        return _Kind.NEW
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments]
    return _Kind.FIRST if written[0] and not any(written[1:]) and len(func._schema.returns) == 1 else _Kind.OTHER


def _device_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device | None:
    """The device of an operator's tensors, if these have no numbers, are of whole precision, and on one device."""
    tensors = [x for x in (*tree_leaves(args), *kwargs.values()) if isinstance(x, Tensor)]
    devices = {x.fake_device if isinstance(x, FakeTensor) and x.dtype in _WHOLE_PRECISION else None for x in tensors}
    return devices.pop() if len(devices) == 1 else None


def _describe(values: Iterable[Any], key: list[Any]) -> bool:
    """Appends a description of values to a key; False where shapes and numbers do not describe them."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor or kind is Tensor:  # the latter has numbers: one of a plan, such as an index
            if value.dtype.is_complex or value.layout is not torch.strided:
                return False
            if kind is FakeTensor and value.constant is not None:
                return False
            device = value.fake_device if kind is FakeTensor else value.device
            key += kind, value.shape, value.stride(), value.dtype, device
        elif kind in _VALUES:
            key += kind, value
        elif issubclass(kind, list | tuple):
            key.append(len(value))
            if not _describe(value, key):
                return False
        else:
            return False
    return True


def _made_by(kind: _Kind, result: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The description by which a result is remembered; `_UNKNOWN` for one that no description makes again."""
    if kind is _Kind.FIRST:
        return True if result is args[0] else _UNKNOWN
    results = result if isinstance(result, tuple) else (result,)
    given = {x.untyped_storage()._cdata for x in fake_tensors((*args, *kwargs.values()))}
    found: list[_Made | None] = []
    for x in results:
        if x is None:
            found.append(None)
            continue
        if type(x) is not FakeTensor or x.constant is not None or x.dtype.is_complex or x.requires_grad:
            return _UNKNOWN
        storage = x.untyped_storage()
        made = _Made(x.shape, x.stride(), x.dtype, x.fake_device)
        if storage._cdata in given or x.storage_offset() or storage.nbytes() != _bytes(made):
            return _UNKNOWN
        given.add(storage._cdata)
        found.append(made)
    return tuple(found) if isinstance(result, tuple) else found[0] or _UNKNOWN


def _bytes(made: _Made) -> int:
    """The bytes of the storage of a tensor that shares it with no other."""
    if 0 in made.shape:
        return 0
    last = sum((extent - 1) * stride for extent, stride in zip(made.shape, made.stride, strict=True))
    return (last + 1) * made.dtype.itemsize


def fake_tensors(values: Iterable[Any]) -> list[FakeTensor]:
    """The tensors without numbers among values, and in lists and tuples of these."""
    found: list[FakeTensor] = []
    for value in values:
        if isinstance(value, FakeTensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += fake_tensors(value)
    return found
