"""A memory map that a program uses as it is, without an index, such as one file for each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy

from distconv.reading.array import METHODS, LazyArray, is_lazy
from distconv.reading.formats import LEAST
from distconv.reading.source import depth


def whole_of(value: Any) -> Any:
    """A memory map of a file as a lazy array, where that can be; anything else as it is."""
    if not depth.value or type(value) is not numpy.memmap or value.ndim < 2 or value.size < LEAST:
        return value
    found = value[...]
    return found if is_lazy(found) else value


def stand_ins() -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """{name: substitute} for the methods that numpy.memmap inherits from numpy.ndarray."""
    of_arrays = {name for name in vars(LazyArray) if hasattr(numpy.ndarray, name)} | METHODS.keys()
    for name in sorted(name for name in of_arrays if not name.startswith("_")):
        method = getattr(numpy.ndarray, name)
        if callable(method):
            yield name, _method
        elif name == "T":
            yield name, _transposed
    yield "__array_ufunc__", _ufunc
    yield "__array_function__", _function


def _method(method: Any) -> Any:
    def call(array: Any, *args: Any, **options: Any) -> Any:
        whole = whole_of(array)
        return method(array, *args, **options) if whole is array else getattr(whole, method.__name__)(*args, **options)

    return call


def _transposed(_: Any) -> Any:
    return property(lambda array: array.transpose())


def _ufunc(_: Any) -> Any:
    def array_ufunc(array: Any, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        outputs = options.get("out", ())
        # What is computed into an array, such as this one, is computed at once.
        operands = inputs if outputs else [whole_of(value) for value in inputs]
        # NumPy's own method refuses arrays with a method such as this one: it is asked about the same memory.
        if outputs:
            options["out"] = tuple(map(_plain, outputs))
        options = {name: value if name == "out" else _plain(value) for name, value in options.items()}
        result = getattr(ufunc, method)(*map(_plain, operands), **options)
        return outputs[0] if len(outputs) == 1 else result

    return array_ufunc


def _plain(value: Any) -> Any:
    return value.view(numpy.ndarray) if type(value) is numpy.memmap else value


def _function(apply: Any) -> Any:
    def array_function(array: Any, function: Any, types: Any, args: Any, options: Any) -> Any:
        changed = _whole_of_all(args), {name: _whole_of_all(value) for name, value in options.items()}
        if changed[0] is args:
            return apply(array, function, types, args, options)
        return function(*changed[0], **changed[1])

    return array_function


def _whole_of_all(value: Any) -> Any:
    """`whole_of` for what is in lists and tuples, too; the same object where there is nothing to change."""
    if type(value) not in (list, tuple):
        return whole_of(value)
    found = [_whole_of_all(each) for each in value]
    return value if all(new is old for new, old in zip(found, value, strict=True)) else type(value)(found)
