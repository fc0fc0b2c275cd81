"""NumPy functions for lazy arrays, besides the elementwise ones. Importing this module registers them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy

from distconv.reading.array import FUNCTIONS, METHODS, LazyArray, NotLazy, axis_of, cast, is_lazy
from distconv.reading.expression import Joined
from distconv.reading.statistic import asked


def _joined(arrays: Any, axis: Any = 0, *, stacked: bool, **options: Any) -> Any:
    items = list(arrays)
    if options or axis is None or not items or not all(map(is_lazy, items)):
        raise NotLazy
    dim = axis_of(axis, items[0].ndim + stacked)
    if len({(*item.shape[:dim], *item.shape[dim + (not stacked) :]) for item in items}) > 1:
        # NumPy's error, of arrays that take no memory.
        (numpy.stack if stacked else numpy.concatenate)([numpy.broadcast_to(0, item.shape) for item in items], axis)
    dtype = numpy.result_type(*(item.dtype for item in items))
    parts = [item.expression if item.dtype == dtype else cast(item.expression, dtype) for item in items]
    return LazyArray(Joined(parts, dim, stacked=stacked))


def _view(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of NumPy that gives a view of any array."""
    return lambda a, *args, **options: a.view_as_lazy(lambda array: function(array, *args, **options))


def _clip(a: Any, a_min: Any = None, a_max: Any = None, out: Any = None, **options: Any) -> Any:
    low, high = options.pop("min", a_min), options.pop("max", a_max)
    if out is not None or options or (low is None and high is None):
        raise NotLazy
    if low is None or high is None:
        return numpy.maximum(a, low) if high is None else numpy.minimum(a, high)
    return numpy.minimum(numpy.maximum(a, low), high)


def _of_method(name: str) -> Callable[..., Any]:
    def call(a: Any, *args: Any, **options: Any) -> Any:
        if type(a) is not LazyArray:
            raise NotLazy
        return getattr(a, name)(*args, **options)

    return call


def _statistic(name: str) -> Callable[..., Any]:
    def call(a: Any, *args: Any, **options: Any) -> Any:
        if not is_lazy(a):
            raise NotLazy
        fake = a.fake()
        made = asked(a.expression, None if fake.flags.c_contiguous else fake.strides, name, args, options)
        if made is NotImplemented:
            raise NotLazy
        return LazyArray(made)

    return call


_METHODS = ("mean", "std", "var", "sum", "prod", "min", "max")
_STATISTICS = (
    *(*_METHODS, "ptp", "amin", "amax", "median", "percentile", "quantile", "nanmean", "nanstd", "nanvar", "nansum"),
    *("nanmin", "nanmax", "nanmedian", "nanpercentile", "nanquantile", "count_nonzero", "any", "all"),
)
METHODS |= {name: getattr(numpy, name) for name in (*_METHODS, "any", "all")}

FUNCTIONS |= {
    **{getattr(numpy, name): _statistic(name) for name in _STATISTICS},
    numpy.stack: partial(_joined, stacked=True),
    numpy.concatenate: partial(_joined, stacked=False),
    **{each: _view(each) for each in (numpy.flip, numpy.flipud, numpy.fliplr, numpy.moveaxis, numpy.expand_dims)},
    numpy.clip: _clip,
    numpy.shape: lambda a: a.shape,
    numpy.ndim: lambda a: a.ndim,
    numpy.size: lambda a, axis=None: a.size if axis is None else a.shape[axis],
    numpy.result_type: lambda *given: numpy.result_type(*(each.dtype if is_lazy(each) else each for each in given)),
    numpy.iscomplexobj: lambda x: numpy.issubdtype(x.dtype, numpy.complexfloating),
    numpy.isrealobj: lambda x: not numpy.issubdtype(x.dtype, numpy.complexfloating),
    **{getattr(numpy, name): _of_method(name) for name in ("transpose", "swapaxes", "squeeze", "reshape", "copy")},
}
