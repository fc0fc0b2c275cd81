"""Makes a sample lazy: replaces the functions that read files while a Dataset makes a sample."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data._utils.collate import collate, default_collate_fn_map

from distconv.reading import array_functions, tensor_functions
from distconv.reading.array import METHODS, LazyArray, is_lazy
from distconv.reading.fault import note
from distconv.reading.formats import LEAST, of_hdf5, of_memmap, of_zarr
from distconv.reading.source import Keeper, depth, shown
from distconv.reading.tensor import LazyTensor, from_array
from mucudnn.process import renewed, substituted

_FUNCTIONS = (array_functions, tensor_functions)  # imported, they are known

_lock = renewed(threading.Lock())
_users = 0
_replaced: set[tuple[int, str]] = set()
_undo = contextlib.ExitStack()


@contextlib.contextmanager
def lazily(keeper: Keeper | None = None) -> Iterator[None]:
    """A context in which this thread's reading of files gives lazy arrays; a keeper, if any, supplies the data."""
    global _users
    with _lock:
        if not _users:
            default_collate_fn_map[LazyTensor] = _collate_tensors
            default_collate_fn_map[LazyArray] = _collate_arrays
        _users += 1
        _replace()
    depth.value += 1
    before, depth.keeper = depth.keeper, keeper
    try:
        yield
    finally:
        depth.value -= 1
        depth.keeper = before
        with _lock:
            _users -= 1
            if not _users:
                _restore()


def _replace() -> None:
    for owner, name, make in _stand_ins():
        if (id(owner), name) not in _replaced:
            _replaced.add((id(owner), name))
            _undo.enter_context(substituted(owner, **{name: make(getattr(owner, name))}))


def renew() -> None:
    """Takes in what has been imported since `lazily` began."""
    with _lock:
        _replace()


def _restore() -> None:
    _undo.close()
    _replaced.clear()
    for kind in (LazyTensor, LazyArray):
        default_collate_fn_map.pop(kind, None)


def _stand_ins() -> Iterator[tuple[Any, str, Callable[[Any], Any]]]:
    yield numpy, "array", _array
    yield numpy, "asarray", _asarray
    yield numpy, "asanyarray", _asarray
    yield numpy, "ascontiguousarray", _ascontiguousarray
    yield torch, "from_numpy", _from_numpy
    yield torch, "as_tensor", _of_torch
    yield torch, "tensor", _of_torch
    yield numpy.memmap, "__getitem__", of_memmap
    for name, make in _of_memory_maps():
        yield numpy.memmap, name, make
    h5py, zarr = sys.modules.get("h5py"), sys.modules.get("zarr")
    if h5py is not None and hasattr(h5py, "File"):
        yield h5py.Dataset, "__getitem__", of_hdf5
        yield h5py.Group, "__getitem__", _named(lambda group, key: (group.file.filename, str(key)))
        yield h5py.File, "__init__", _named(lambda file, path: (str(path), ""))
    if zarr is not None and hasattr(zarr, "Array"):
        yield zarr.Array, "__getitem__", of_zarr
        yield zarr.Group, "__getitem__", _named(lambda group, key: (str(group.store_path), str(key)))


def _read(value: Any) -> Any:
    """An array that a program hands to NumPy as it is in its file, lazily where it can be."""
    for module, name in (("h5py", "Dataset"), ("zarr", "Array")):
        if depth.value and module in sys.modules and isinstance(value, getattr(sys.modules[module], name, ())):
            whole: Any = value
            return whole[()] if module == "h5py" else whole[...]
    return _whole_of(value)


def _asarray(make: Any) -> Any:
    def asarray(value: Any, *args: Any, **options: Any) -> Any:
        value = _read(value)
        dtype = args[0] if len(args) == 1 else options.get("dtype") if not args else _ELSE
        if not is_lazy(value) or dtype is _ELSE or options.keys() - {"dtype"}:
            return make(value, *args, **options)
        return value if dtype is None else value.astype(dtype, copy=False)

    return asarray


_ELSE = object()


def _array(make: Any) -> Any:
    def array(value: Any, *args: Any, **options: Any) -> Any:
        made = _asarray(make)(value, *args, **{name: each for name, each in options.items() if name != "copy"})
        if not is_lazy(made):
            return make(_read(value), *args, **options)
        return made.copy() if made is value and options.get("copy", True) else made

    return array


def _ascontiguousarray(make: Any) -> Any:
    def ascontiguousarray(value: Any, *args: Any, **options: Any) -> Any:
        made = _asarray(make)(value, *args, **options)
        return made.copy() if is_lazy(made) and not made.is_contiguous() else made

    return ascontiguousarray


def _from_numpy(make: Any) -> Any:
    def from_numpy(array: Any) -> Any:
        array = _whole_of(array)
        if not is_lazy(array):
            return make(array.present if type(array) is LazyArray else array)
        try:
            return from_array(array)
        except (TypeError, ValueError) as error:
            for source in array.expression.sources():
                note(error, shown(source.path), source.key)
            raise

    return from_numpy


def _of_torch(make: Any) -> Any:
    """torch.as_tensor and torch.tensor; the latter copies."""

    def tensor(data: Any, *args: Any, **options: Any) -> Any:
        data = _read(data)
        if type(data) is LazyArray and data.present is not None:
            data = data.present
        if not is_lazy(data) or args or options.keys() - {"dtype", "device"}:
            return make(data, *args, **options)
        made = torch.from_numpy(data.copy() if make.__name__ == "tensor" else data)
        return made.to(**{name: value for name, value in options.items() if value is not None}) if options else made

    return tensor


def _named(names: Callable[[Any, Any], tuple[str, str]]) -> Callable[[Any], Any]:
    """Makes wrappers of functions that open an object of a file: their errors name the file and the object."""

    def make(function: Any) -> Any:
        @functools.wraps(function)
        def call(owner: Any, name: Any = None, *args: Any, **options: Any) -> Any:
            try:
                return function(owner, name, *args, **options)
            except Exception as error:
                if depth.value:
                    with contextlib.suppress(Exception):
                        path, key = names(owner, name)
                        note(error, shown(path), key)
                raise

        return call

    return make


def _collate_tensors(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return torch.stack(batch, 0)


def _collate_arrays(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return collate([torch.as_tensor(each) for each in batch], collate_fn_map=collate_fn_map)


def _whole_of(value: Any) -> Any:
    """A memory map of a file as a lazy array, where that can be; anything else as it is."""
    if not depth.value or type(value) is not numpy.memmap or value.ndim < 2 or value.size < LEAST:
        return value
    found = value[...]
    return found if is_lazy(found) else value


def _of_memory_maps() -> Iterator[tuple[str, Callable[[Any], Any]]]:
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
        whole = _whole_of(array)
        return method(array, *args, **options) if whole is array else getattr(whole, method.__name__)(*args, **options)

    return call


def _transposed(_: Any) -> Any:
    return property(lambda array: array.transpose())


def _ufunc(_: Any) -> Any:
    def array_ufunc(array: Any, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        outputs = options.get("out", ())
        # What is computed into an array, such as this one, is computed at once.
        operands = inputs if outputs else [_whole_of(value) for value in inputs]
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
        return _whole_of(value)
    found = [_whole_of_all(each) for each in value]
    return value if all(new is old for new, old in zip(found, value, strict=True)) else type(value)(found)
