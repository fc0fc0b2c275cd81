"""Lazy NumPy arrays, whose elements are still in a file."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy
from numpy.exceptions import AxisError
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.lib.stride_tricks import as_strided

from distconv.reading.expression import Computed, Expression, Viewed
from distconv.reading.memory import Memory, Number, Step
from distconv.reading.statistic import are_left_open, is_of_statistics
from distconv.reading.view import View, contiguous_strides, plain_index

FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""NumPy's functions that leave arrays lazy, besides those of single elements; they raise NotLazy if they cannot."""


METHODS: dict[str, Callable[..., Any]] = {}  # The methods of NumPy's arrays that may be left open, by their names.


class LazyArray(NDArrayOperatorsMixin, Number):
    """An array of NumPy whose elements are read when they are needed.

    Slices, transposes, flips, casts, functions of single elements, stacking and concatenation give lazy arrays. All
    else reads the whole and goes on with the array that it is.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, expression: Expression, memory: Memory | None = None, steps: tuple[Step, ...] = ()) -> None:
        self.look(expression, memory, steps)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return numpy.ndarray  # what programs ask for; no method here relies on it

    @property
    def shape(self) -> tuple[int, ...]:
        return self.expression.shape

    @property
    def dtype(self) -> Any:
        return self.expression.dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def T(self) -> Any:
        return self.transpose()

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        return (self[position] for position in range(len(self)))

    def __getitem__(self, key: Any) -> Any:
        if self.present is not None:
            return self.present[key]
        keys = plain_index(key)
        made = None if keys is None else self.view_as_lazy(operator.itemgetter(keys))
        if made is None:
            return self.read("indexing an array")[key]
        if made.shape or not isinstance(made, LazyArray) or is_of_statistics(made.expression):
            return made
        return made.read("a number of an array")[()]

    def view_as_lazy(self, step: Step) -> Any:
        """The view of this array that `step` makes of any array, without a copy; None for what is more than a view.

        NumPy says what the step does, with an array that has no memory for its elements, and raises its own errors: so
        the step must read none of them.
        """
        if self.present is not None:
            return step(self.present)
        alike = as_strided(numpy.zeros(1, numpy.uint8), self.shape, contiguous_strides(self.shape))
        made = step(alike)
        first = made.__array_interface__["data"][0] - alike.__array_interface__["data"][0]
        view = View.of_strides(self.shape, made.shape, made.strides, first)
        return None if view is None else LazyArray(Viewed(self.expression, view), self.memory, (*self.steps, step))

    def __setitem__(self, key: Any, value: Any) -> None:
        self.read("writing into an array")[key] = value

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> numpy.ndarray:
        return numpy_array(self.read("numpy.asarray"), dtype=dtype, copy=copy)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in METHODS and self.present is None and are_left_open():
            return functools.partial(METHODS[name], self)
        return getattr(self.read(f"ndarray.{name}"), name)

    def __array_ufunc__(self, ufunc: numpy.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        outputs = options.get("out", ())
        if any(not _is_known(value) for value in (*inputs, *outputs)):
            return NotImplemented
        lazily = method == "__call__" and ufunc.nout == 1 and ufunc.signature is None
        if lazily and not options.keys() - {"dtype", "casting", "out"} and (not outputs or outputs[0] is self):
            made = _computed(ufunc, inputs, {name: value for name, value in options.items() if name != "out"}, outputs)
            if made is not None and not outputs:
                return made
            if made is not None and self.present is None and not self.memory.is_shared(self):
                self.look(made.expression)
                return self
        name = f"numpy.{ufunc.__name__}" + (f".{method}" if method != "__call__" else "")
        if outputs:
            options["out"] = tuple(real(value, name) for value in outputs)
        result = getattr(ufunc, method)(*(real(value, name) for value in inputs), **options)
        return outputs[0] if len(outputs) == 1 else result

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        handler = FUNCTIONS.get(function)
        if handler is not None:
            try:
                made = handler(*args, **options)
            except NotLazy:
                made = NotImplemented
            if made is not NotImplemented:
                return made
        name = f"numpy.{function.__name__}"
        return function(*_real_all(args, name), **{key: _real_all(value, name) for key, value in options.items()})

    def astype(
        self, dtype: Any, order: Any = "K", casting: Any = "unsafe", subok: bool = True, copy: bool = True
    ) -> Any:
        if self.present is not None:
            return self.present.astype(dtype, order, casting, subok, copy)
        wanted = numpy.dtype(dtype)
        if not copy and wanted == self.dtype:
            return self
        numpy.empty(0, self.dtype).astype(wanted, casting=casting)  # or its TypeError
        return LazyArray(cast(self.expression, wanted))

    def copy(self, order: str = "C") -> Any:
        return self.present.copy(order) if self.present is not None else LazyArray(self.expression)

    def __copy__(self) -> Any:
        return self.copy()

    def __deepcopy__(self, _: Any) -> Any:
        return self.copy()

    def __reduce__(self) -> Any:
        return self.read("pickling an array").__reduce__()

    def transpose(self, *axes: Any) -> Any:
        return self.view_as_lazy(lambda array: array.transpose(*axes))

    def swapaxes(self, axis1: Any, axis2: Any) -> Any:
        return self.view_as_lazy(lambda array: array.swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> Any:
        return self.view_as_lazy(lambda array: array.squeeze(axis))

    def reshape(self, *shape: Any, **options: Any) -> Any:
        given = shape[0] if len(shape) == 1 and not hasattr(type(shape[0]), "__index__") else shape
        if not options:
            target = tuple(map(operator.index, given))
            made = self.view_as_lazy(lambda array: array.reshape(target))
            if made is not None:
                return made
        return self.read("ndarray.reshape").reshape(*shape, **options)

    def clip(self, min: Any = None, max: Any = None, out: Any = None, **options: Any) -> Any:
        return numpy.clip(self, min, max, out, **options)

    def is_contiguous(self) -> bool:
        """Whether NumPy would say so of the array that this is."""
        return bool(self.fake().flags.c_contiguous)


def is_lazy(value: Any) -> bool:
    """Whether it is a lazy array that has not been read."""
    return type(value) is LazyArray and value.present is None


def real(value: Any, why: str) -> Any:
    """The array that a lazy one is; anything else as it is."""
    return value.read(why) if type(value) is LazyArray else value


def _real_all(value: Any, why: str) -> Any:
    if type(value) in (list, tuple):
        return type(value)(_real_all(each, why) for each in value)
    return real(value, why)


numpy_array = numpy.array  # The function itself where it has a substitute.


class NotLazy(Exception):
    """A call that has to read the whole."""


def axis_of(axis: Any, ndim: int) -> int:
    at = operator.index(axis)
    if not -ndim <= at < ndim:
        raise AxisError(at, ndim)
    return at % ndim


def _is_known(value: Any) -> bool:
    return type(value) is LazyArray or isinstance(value, numpy.ndarray | numpy.generic | int | float | complex | list)


def _operand(value: Any) -> Any:
    """An operand that keeps its value, whatever the program does with it later."""
    if is_lazy(value):
        return value.expression
    if type(value) is LazyArray:
        value = value.present
    return numpy_array(value) if isinstance(value, numpy.ndarray | list) else value


def _computed(ufunc: Any, inputs: Sequence[Any], options: dict[str, Any], out: Sequence[Any] = ()) -> Any:
    """A ufunc of lazy arrays, lazily; None where none of them is one any more."""
    operands = [_operand(value) for value in inputs]
    if not any(isinstance(operand, Expression) for operand in operands):
        return None
    # Without elements it gives the dtype, and fails as it would with them.
    tried = [
        numpy.empty((0,) if operand.shape else (), operand.dtype) if hasattr(operand, "shape") else operand
        for operand in operands
    ]
    into = tuple(numpy.empty((0,) if value.shape else (), value.dtype) for value in out)
    result = ufunc(*tried, **options, **({"out": into} if out else {}))
    shape = numpy.broadcast_shapes(*(operand.shape for operand in operands if hasattr(operand, "shape")))
    if out and shape != out[0].shape:
        raise ValueError(f"non-broadcastable output operand with shape {out[0].shape} doesn't match {shape}")
    expression: Expression = Computed(
        ufunc, operands, shape, numpy.asarray(ufunc(*tried, **options)).dtype, str(ufunc), options
    )
    if expression.dtype != result.dtype:
        expression = cast(expression, result.dtype)
    return LazyArray(expression)


def cast_array(array: Any, dtype: Any) -> Any:
    return array.astype(dtype)


def cast(expression: Expression, dtype: Any) -> Expression:
    return Computed(cast_array, [expression], expression.shape, dtype, f"cast to {dtype}", {"dtype": dtype})
