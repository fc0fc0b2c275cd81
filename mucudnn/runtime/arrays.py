"""Convolutions of arrays from NumPy, CuPy and other libraries."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import DTYPE_BYTES, ConvProblem, Direction, Shape
from mucudnn.devices import KINDS, Gpu, device_of
from mucudnn.process.at_fork import renewed
from mucudnn.providers import stock_result
from mucudnn.runtime import shim
from mucudnn.runtime.session import Session
from mucudnn.settings import Settings

Array = TypeVar("Array")


def convolve(
    x: Array,
    w: Any,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    workspace_limit: str | float | None = None,
) -> Array:
    """The convolution of two arrays of any library that speaks DLPack (NumPy, CuPy, JAX, torch), read in place.

    It is divided as `patch` divides those of torch: planned at the first call with these shapes and this limit, from
    measured times. It computes what deep learning calls a convolution, a correlation: the kernel is not flipped.
    Work on CuPy's arrays is in the order of CuPy's current stream.

    Args:
        x: (N, C, *spatial), 1 to 3 spatial dims.
        w: (F, C / groups, *kernel), of the type and on the device of `x`.
        stride, padding, dilation: a number, or one per spatial dim; padding is the same at both ends.
        groups: divides C and F.
        workspace_limit: as of `patch`. If not given, that of `patch` where torch is patched, else from the environment.

    Returns:
        (N, F, *outputs), an array of the kind of `x`, of its type and on its device.

    Raises:
        TypeError: for what is no array that can be read in place, or of a type that is not convolved.
        ValueError: for shapes, a geometry or a limit that are not accepted. Both are one line.
    """
    with _stream_of(x):
        source, weight = _tensor("x", x), _tensor("w", w)
        problem = _problem(source, weight, stride, padding, dilation, groups)
        return _array_like(_result(session_within(workspace_limit), problem, source, weight), x)


def _result(session: Session, problem: ConvProblem, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    geometry = (problem.stride, problem.padding, problem.dilation, False, (0,) * problem.dims, problem.groups)
    call = Call(Direction.FORWARD, x, w, None, None, *geometry)
    looks = x.device, x.dtype, x.shape, x.stride(), w.shape, w.stride()
    decision = session.decide(("convolve", *looks, geometry, device_of(x.device).switches()), call)
    result = None if decision is None else decision.run(call)
    return stock_result(problem, call.operands()) if result is None else result


MOST_SESSIONS = 16
"""Plans within so many different settings are kept at once; what was planned within others is in the database."""

sessions: dict[Settings, Session] = {}
"""The sessions of calls that torch's own patch does not serve, kept with their plans for the next calls."""

_lock = renewed(threading.Lock())


def session_within(workspace_limit: str | float | None) -> Session:
    """The session that serves `convolve`: that of `patch` where there is one and no limit is given, else its own."""
    patched = shim.current_session()
    if workspace_limit is None and patched is not None:
        return patched
    settings = Settings.from_environment(workspace_limit=workspace_limit)
    with _lock:
        if settings not in sessions:
            while len(sessions) >= MOST_SESSIONS:
                sessions.pop(next(iter(sessions))).close()
            sessions[settings] = Session(settings)
        return sessions[settings]


def _problem(
    x: torch.Tensor,
    w: torch.Tensor,
    stride: int | Sequence[int],
    padding: int | Sequence[int],
    dilation: int | Sequence[int],
    groups: int,
) -> ConvProblem:
    if not 3 <= x.dim() <= 5:
        raise ValueError(f"x has shape {tuple(x.shape)}: accepted is (N, C, *spatial) with 1 to 3 spatial dims")
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise TypeError(f"x is {dtype}: accepted are {', '.join(DTYPE_BYTES)}")
    if x.device.type not in KINDS:
        raise TypeError(f"x is on {x.device}: accepted are arrays on {' or '.join(KINDS)}")
    for name, ours, its in (("type", x.dtype, w.dtype), ("device", x.device, w.device)):
        if ours != its:
            raise TypeError(f"x and w must share one {name}: x has {ours}, w has {its}")
    if not _is_count(groups, 1):
        raise ValueError(f"groups={groups!r}: accepted is a number from 1 on")
    dims = x.dim() - 2
    return ConvProblem.of_convolution(
        Direction.FORWARD,
        tuple(x.shape),
        tuple(w.shape),
        stride=_per_dim("stride", stride, dims, 1),
        padding=_per_dim("padding", padding, dims, 0),
        dilation=_per_dim("dilation", dilation, dims, 1),
        groups=groups,
        dtype=dtype,
    )


def _per_dim(name: str, value: int | Sequence[int], dims: int, least: int) -> Shape:
    values = value if isinstance(value, Sequence) else (value,) * dims
    if len(values) == dims and all(_is_count(number, least) for number in values):
        return tuple(map(int, values))
    raise ValueError(f"{name}={value!r}: accepted is a number from {least} on, or {dims} of them, one per spatial dim")


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= least


def _tensor(name: str, array: Any) -> torch.Tensor:
    """The array's memory as a tensor."""
    if isinstance(array, torch.Tensor):
        if type(array) not in (torch.Tensor, torch.nn.Parameter) or array.layout != torch.strided:
            raise TypeError(f"{name} is a {type(array).__name__} of layout {array.layout}: accepted is a plain tensor")
        if array.requires_grad and torch.is_grad_enabled():
            raise TypeError(f"{name} requires a gradient, which convolve does not give: use torch with mucudnn.patch")
        return array.detach()
    if isinstance(array, np.ma.MaskedArray) or (isinstance(array, np.ndarray) and not array.flags.aligned):
        raise TypeError(f"{name} is a masked or an unaligned array: accepted is a plain one")
    if not hasattr(array, "__dlpack__"):
        raise TypeError(f"{name} is a {type(array).__name__}: accepted are arrays of libraries that speak DLPack")
    if any(step < 0 for step in getattr(array, "strides", None) or ()):  # these would end the process in torch
        raise TypeError(f"{name} runs backwards (strides {array.strides}) and cannot be read in place: pass a copy")
    try:
        return torch.utils.dlpack.from_dlpack(_writable(array) if isinstance(array, np.ndarray) else array)
    except (BufferError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else repr(error)
        raise TypeError(f"{name}, a {type(array).__name__}, cannot be read in place: {reason}") from error


class _Memory:
    """An array's memory under NumPy's array interface, without its being read-only."""

    def __init__(self, array: np.ndarray) -> None:
        self.owner = array
        address, _ = array.__array_interface__["data"]
        self.__array_interface__ = {**array.__array_interface__, "data": (address, False)}


def _writable(array: np.ndarray) -> np.ndarray:
    """The array itself, or a view of a read-only one that DLPack, which knows no such thing, lets through."""
    return array if array.flags.writeable else np.asarray(_Memory(array))


def _array_like(result: torch.Tensor, example: Any) -> Any:
    """The result's memory as an array of the example's library."""
    if isinstance(example, torch.Tensor):
        return result
    if isinstance(example, np.ndarray):
        return result.numpy()
    if hasattr(example, "__array_namespace__"):
        return example.__array_namespace__().from_dlpack(result)
    library = type(example).__module__.partition(".")[0]
    return importlib.import_module(library).from_dlpack(result)


def _stream_of(array: Any) -> contextlib.AbstractContextManager[object]:
    """Makes CuPy's current stream torch's, so that work and memory are in the order its user expects."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(array, cupy.ndarray):
        return contextlib.nullcontext()
    gpu = array.device.id
    return Gpu(torch.device("cuda", gpu)).on_stream(cupy.cuda.get_current_stream(gpu).ptr)
