"""The algorithms of cuDNN's older functions, among which mu-cuDNN (Oyama et al. 2018) chose, as a provider."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import byref, c_double, c_float, c_int, c_size_t, c_void_p
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mucudnn.convolution.problem import ALIGNMENT, ConvProblem, Role, Shape
from mucudnn.providers.cudnn.allowed import is_deterministic, is_tf32
from mucudnn.providers.cudnn.backend import CROSS_CORRELATION, DATA_TYPES
from mucudnn.providers.cudnn.form import Form, form, strides
from mucudnn.providers.cudnn.launch import CudnnProvider, Prepared
from mucudnn.providers.cudnn.library import CudnnError, Library
from mucudnn.providers.cudnn.plans import Plans

if TYPE_CHECKING:
    from mucudnn.providers.cudnn.card import Card

ALGORITHMS = {
    Role.Y: {
        "implicit_gemm": 0,
        "implicit_precomp_gemm": 1,
        "gemm": 2,
        "fft": 4,
        "fft_tiling": 5,
        "winograd": 6,
        "winograd_nonfused": 7,
    },
    Role.X: {"0": 0, "1": 1, "fft": 2, "fft_tiling": 3, "winograd": 4, "winograd_nonfused": 5},
    Role.W: {"0": 0, "1": 1, "fft": 2, "3": 3, "winograd_nonfused": 5, "fft_tiling": 6},
}
"""cudnnConvolution{Fwd,BwdData,BwdFilter}Algo_t by what is computed; those that were never implemented are left out."""

NONDETERMINISTIC = {Role.Y: frozenset[str](), Role.X: frozenset({"0"}), Role.W: frozenset({"0", "3"})}

PREFIX = "legacy_"

DEFAULT_MATH, TENSOR_OP_MATH, FMA_MATH = 0, 1, 3
"""cudnnMathType_t. The default computes float32 in TF32 where the card can."""

NCHW, NHWC = 0, 1  # cudnnTensorFormat_t.

_OPERATIONS = {Role.Y: "Forward", Role.X: "BackwardData", Role.W: "BackwardFilter"}

_ORDER = {Role.Y: (Role.X, Role.W, Role.Y), Role.X: (Role.W, Role.Y, Role.X), Role.W: (Role.X, Role.Y, Role.W)}
"""The tensors as the functions take them: two that are read, then the one that is written."""


class Described:
    """The legacy descriptors of one convolution; they free themselves."""

    def __init__(self, library: Library, form: Form, math_type: int) -> None:
        """
        Raises:
            CudnnError: where cuDNN refuses.
        """
        self._library = library
        self._made: list[tuple[str, c_void_p]] = []
        problem = form.problem
        dtype = DATA_TYPES[problem.dtype]
        compute = DATA_TYPES["float64" if problem.dtype == "float64" else "float32"]
        self.tensors: dict[Role, c_void_p] = {}  # The descriptors of x, w and y.
        for role, shape in zip(Role, form.shapes, strict=True):
            if role is Role.W:
                made = self._create("Filter")
                layout = NCHW if form.format == "contiguous" else NHWC
                status = library.cudnnSetFilterNdDescriptor(made, dtype, layout, len(shape), _ints(shape))
            else:
                made = self._create("Tensor")
                steps = _ints(strides(shape, form.format))
                status = library.cudnnSetTensorNdDescriptor(made, dtype, len(shape), _ints(shape), steps)
            library.check(status, f"describe {role}")
            self.tensors[role] = made
        self.convolution = self._create("Convolution")
        geometry = (_ints(form.padding), _ints(form.stride), _ints(form.dilation))
        for status in (
            library.cudnnSetConvolutionNdDescriptor(
                self.convolution, len(form.stride), *geometry, CROSS_CORRELATION, compute
            ),
            library.cudnnSetConvolutionGroupCount(self.convolution, problem.groups),
            library.cudnnSetConvolutionMathType(self.convolution, math_type),
        ):
            library.check(status, "describe the convolution")

    def _create(self, kind: str) -> c_void_p:
        made = self._library.created(f"cudnnCreate{kind}Descriptor")
        self._made.append((f"cudnnDestroy{kind}Descriptor", made))
        return made

    def __del__(self) -> None:
        for destroy, made in getattr(self, "_made", ()):
            getattr(self._library, destroy)(made)


def _execute(
    library: Library, form: Form, described: Described, number: int, accumulate: bool, size: int,
    handle: c_void_p, x: int, w: int, y: int, workspace: int,
) -> None:  # fmt: skip
    problem = form.problem
    target = problem.target
    scalar = c_double if problem.dtype == "float64" else c_float
    addresses = {Role.X: x, Role.W: w, Role.Y: y}
    first, second, last = ((described.tensors[role], addresses[role]) for role in _ORDER[target])
    how = described.convolution, number, workspace, size, byref(scalar(1.0 if accumulate else 0.0))
    status = getattr(library, f"cudnnConvolution{_OPERATIONS[target]}")(
        handle, byref(scalar(1.0)), *first, *second, *how, *last
    )
    if status:
        library.check(status, f"cudnnConvolution{_OPERATIONS[target]}")


class Legacy(CudnnProvider):
    """cuDNN's older functions, each of their algorithms under its own name: "legacy_fft_tiling"."""

    def __init__(self, place: Card) -> None:
        super().__init__(place)
        self._plans = Plans(self._made)

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        left_out = _left_out(problem)
        names = (PREFIX + name for name in ALGORITHMS[problem.target])
        return tuple(name for name in names if name not in left_out and self.serves(problem, name))

    def refused(self, problem: ConvProblem) -> dict[str, str]:
        """Why algorithms are not offered now."""
        reasons = dict.fromkeys(sorted(_left_out(problem)), "it is not deterministic")
        return self._with_refusals(reasons, problem, [PREFIX + name for name in ALGORITHMS[problem.target]])

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        own = self._plans.workspace(*self._key(problem, algorithm, False))
        put = form(problem)
        assert put is not None, "there is a plan of it"
        return own + put.copied_bytes

    def prepared(self, problem: ConvProblem, algorithm: str, accumulate: bool) -> Prepared:
        return self._plans.plan(*self._key(problem, algorithm, accumulate))

    def _key(self, problem: ConvProblem, algorithm: str, accumulate: bool) -> tuple[ConvProblem, str, bool, int]:
        # The legacy functions find out the alignment by themselves.
        whole = problem if problem.alignment == ALIGNMENT else replace(problem, alignment=ALIGNMENT)
        return whole, algorithm, accumulate, math_type(problem)

    def _made(self, problem: ConvProblem, algorithm: str, accumulate: bool, math: int) -> Prepared:
        put = form(problem)
        if put is None or not put.is_symmetric:
            raise CudnnError("form", 0, "the older functions use the same padding at both ends")
        library, operation = self.place.library, _OPERATIONS[problem.target]
        number = ALGORITHMS[problem.target][algorithm.removeprefix(PREFIX)]
        size = c_size_t()
        with self.place.current():
            described = Described(library, put, math)
            first, second, last = (described.tensors[role] for role in _ORDER[problem.target])
            status = getattr(library, f"cudnnGetConvolution{operation}WorkspaceSize")(
                self.place.handle(), first, second, described.convolution, last, number, byref(size)
            )
            library.check(status, f"cudnnGetConvolution{operation}WorkspaceSize")
        given = library, put, described, number, accumulate, size.value
        return Prepared(put, size.value, partial(_execute, *given))  # these functions find out alignments by themselves


def _left_out(problem: ConvProblem) -> frozenset[str]:
    """The algorithms that torch's settings do not allow now."""
    return frozenset(PREFIX + name for name in NONDETERMINISTIC[problem.target]) if is_deterministic() else frozenset()


def math_type(problem: ConvProblem) -> int:
    """The type of arithmetic (cudnnMathType_t) that torch's settings allow now."""
    if problem.is_half:
        return TENSOR_OP_MATH
    return FMA_MATH if problem.dtype == "float32" and not is_tf32() else DEFAULT_MATH


def _ints(values: Shape) -> Any:
    return (c_int * len(values))(*values)
