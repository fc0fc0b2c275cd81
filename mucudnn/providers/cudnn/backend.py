"""Descriptor: one object of cuDNN's backend API, which is created, filled, finalized, read and freed."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from ctypes import Array, byref, c_bool, c_char, c_double, c_float, c_int, c_int64, c_void_p, create_string_buffer
from typing import Any

from mucudnn.providers.cudnn.library import Library


class DescriptorKind(enum.IntEnum):
    """cudnnBackendDescriptorType_t."""

    CONVOLUTION = 1
    ENGINE = 2
    ENGINECFG = 3
    ENGINEHEUR = 4
    EXECUTION_PLAN = 5
    KNOB_CHOICE = 7
    OPERATION_CONVOLUTION_FORWARD = 10
    OPERATION_CONVOLUTION_BACKWARD_FILTER = 11
    OPERATION_CONVOLUTION_BACKWARD_DATA = 12
    OPERATIONGRAPH = 15
    VARIANT_PACK = 16
    TENSOR = 17
    KERNEL_CACHE = 34
    DEVICEPROP = 38


class AttributeName(enum.IntEnum):
    """cudnnBackendAttributeName_t."""

    CONVOLUTION_COMP_TYPE = 100
    CONVOLUTION_CONV_MODE = 101
    CONVOLUTION_DILATIONS = 102
    CONVOLUTION_FILTER_STRIDES = 103
    CONVOLUTION_POST_PADDINGS = 104
    CONVOLUTION_PRE_PADDINGS = 105
    CONVOLUTION_SPATIAL_DIMS = 106
    ENGINEHEUR_MODE = 200
    ENGINEHEUR_OPERATION_GRAPH = 201
    ENGINEHEUR_RESULTS = 202
    ENGINEHEUR_DEVICEPROP = 204
    ENGINECFG_ENGINE = 300
    ENGINECFG_KNOB_CHOICES = 302
    EXECUTION_PLAN_HANDLE = 400
    EXECUTION_PLAN_ENGINE_CONFIG = 401
    EXECUTION_PLAN_WORKSPACE_SIZE = 402
    EXECUTION_PLAN_JSON_REPRESENTATION = 405
    EXECUTION_PLAN_KERNEL_CACHE = 406
    EXECUTION_PLAN_DEVICEPROP = 407
    KNOB_CHOICE_KNOB_TYPE = 600
    KNOB_CHOICE_KNOB_VALUE = 601
    OPERATION_CONVOLUTION_FORWARD_ALPHA = 700
    OPERATION_CONVOLUTION_FORWARD_BETA = 701
    OPERATION_CONVOLUTION_FORWARD_CONV_DESC = 702
    OPERATION_CONVOLUTION_FORWARD_W = 703
    OPERATION_CONVOLUTION_FORWARD_X = 704
    OPERATION_CONVOLUTION_FORWARD_Y = 705
    OPERATION_CONVOLUTION_BWD_DATA_ALPHA = 706
    OPERATION_CONVOLUTION_BWD_DATA_BETA = 707
    OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC = 708
    OPERATION_CONVOLUTION_BWD_DATA_W = 709
    OPERATION_CONVOLUTION_BWD_DATA_DX = 710
    OPERATION_CONVOLUTION_BWD_DATA_DY = 711
    OPERATION_CONVOLUTION_BWD_FILTER_ALPHA = 712
    OPERATION_CONVOLUTION_BWD_FILTER_BETA = 713
    OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC = 714
    OPERATION_CONVOLUTION_BWD_FILTER_DW = 715
    OPERATION_CONVOLUTION_BWD_FILTER_X = 716
    OPERATION_CONVOLUTION_BWD_FILTER_DY = 717
    OPERATIONGRAPH_HANDLE = 800
    OPERATIONGRAPH_OPS = 801
    OPERATIONGRAPH_ENGINE_GLOBAL_COUNT = 802
    OPERATIONGRAPH_IS_DYNAMIC_SHAPE_ENABLED = 803
    TENSOR_BYTE_ALIGNMENT = 900
    TENSOR_DATA_TYPE = 901
    TENSOR_DIMENSIONS = 902
    TENSOR_STRIDES = 903
    TENSOR_UNIQUE_ID = 906
    VARIANT_PACK_UNIQUE_IDS = 1000
    VARIANT_PACK_DATA_POINTERS = 1001
    VARIANT_PACK_WORKSPACE = 1003
    ENGINE_OPERATION_GRAPH = 1300
    ENGINE_GLOBAL_INDEX = 1301
    ENGINE_NUMERICAL_NOTE = 1303
    ENGINE_BEHAVIOR_NOTE = 1305
    ENGINE_DEVICEPROP = 1307
    KERNEL_CACHE_OPERATION_GRAPH = 2400
    DEVICEPROP_HANDLE = 2701
    DEVICEPROP_JSON_REPRESENTATION = 2702


class Type(enum.IntEnum):
    """cudnnBackendAttributeType_t."""

    HANDLE = 0
    DATA_TYPE = 1
    BOOLEAN = 2
    INT64 = 3
    FLOAT = 4
    DOUBLE = 5
    VOID_PTR = 6
    CONVOLUTION_MODE = 7
    HEUR_MODE = 8
    KNOB_TYPE = 9
    NUMERICAL_NOTE = 11
    BACKEND_DESCRIPTOR = 15
    BEHAVIOR_NOTE = 19
    CHAR = 24


class NumericalNote(enum.IntEnum):
    """cudnnBackendNumericalNote_t."""

    TENSOR_CORE = 0
    DOWN_CONVERT_INPUTS = 1
    REDUCED_PRECISION_REDUCTION = 2
    FFT = 3
    NONDETERMINISTIC = 4
    WINOGRAD = 5
    WINOGRAD_TILE_4x4 = 6
    WINOGRAD_TILE_6x6 = 7
    WINOGRAD_TILE_13x13 = 8
    STRICT_NAN_PROP = 9


class Behavior(enum.IntEnum):
    """cudnnBackendBehaviorNote_t."""

    RUNTIME_COMPILATION = 0
    REQUIRES_FILTER_INT8x32_REORDER = 1
    REQUIRES_BIAS_INT8x32_REORDER = 2
    SUPPORTS_CUDA_GRAPH_NATIVE_API = 3
    CUBLASLT_DEPENDENCY = 4


class HeuristicMode(enum.IntEnum):
    """cudnnBackendHeurMode_t."""

    FALLBACK = 2
    A = 3


CROSS_CORRELATION = 1  # cudnnConvolutionMode_t: what deep learning calls a convolution.

DATA_TYPES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 9}  # cudnnDataType_t by torch's names.

_C_TYPES: dict[Type, Any] = {
    **dict.fromkeys((Type.HANDLE, Type.VOID_PTR, Type.BACKEND_DESCRIPTOR), c_void_p),
    **{Type.BOOLEAN: c_bool, Type.INT64: c_int64, Type.FLOAT: c_float, Type.DOUBLE: c_double, Type.CHAR: c_char},
}
"""All others are enums."""


class Descriptor:
    """A backend descriptor; it keeps those it refers to alive and frees itself."""

    def __init__(self, library: Library, kind: DescriptorKind) -> None:
        """
        Raises:
            CudnnError: where cuDNN refuses; so do all methods.
        """
        self._library = library
        self._kind = kind
        self._kept: list[Descriptor] = []
        self.pointer = c_void_p()  # cudnnBackendDescriptor_t.
        library.check(library.cudnnBackendCreateDescriptor(kind, byref(self.pointer)), f"create {kind.name}")

    def __del__(self) -> None:
        if getattr(self, "pointer", None):
            self._library.cudnnBackendDestroyDescriptor(self.pointer)

    def set(self, name: AttributeName, kind: Type, *values: Any) -> Descriptor:
        """Sets an attribute of any number of elements; descriptors are given as such."""
        if kind is Type.BACKEND_DESCRIPTOR:
            self._kept += values
            values = tuple(value.pointer for value in values)
        return self._set(name, kind, len(values), (_C_TYPES.get(kind, c_int) * len(values))(*values))

    def set_text(self, name: AttributeName, text: bytes) -> Descriptor:
        return self._set(name, Type.CHAR, len(text), create_string_buffer(text, len(text)))

    def text(self, name: AttributeName) -> str:
        """An attribute of characters."""
        characters = create_string_buffer(self.count(name, Type.CHAR))
        filled = self._get(name, Type.CHAR, characters)
        return characters.raw[:filled].rstrip(b"\0").decode()

    def _set(self, name: AttributeName, kind: Type, count: int, values: Array[Any]) -> Descriptor:
        status = self._library.cudnnBackendSetAttribute(self.pointer, name, kind, count, values)
        self._library.check(status, f"set {name.name}")
        return self

    def finalize(self) -> Descriptor:
        status = self._library.cudnnBackendFinalize(self.pointer)
        self._library.check(status, f"finalize {self._kind.name}")
        return self

    def numbers(self, name: AttributeName, kind: Type, most: int = 1) -> list[int]:
        """The elements of an attribute, at most so many."""
        values = (_C_TYPES.get(kind, c_int) * most)()
        return list(values[: self._get(name, kind, values)])

    def descriptors(self, name: AttributeName, made: Sequence[Descriptor]) -> Sequence[Descriptor]:
        """Fills the made descriptors with the elements of an attribute; returns those that were filled."""
        pointers = (c_void_p * len(made))(*(one.pointer for one in made))
        return made[: self._get(name, Type.BACKEND_DESCRIPTOR, pointers)]

    def _get(self, name: AttributeName, kind: Type, values: Array[Any]) -> int:
        """Fills values with the elements of an attribute; returns how many were filled."""
        return min(self.count(name, kind, values), len(values))

    def count(self, name: AttributeName, kind: Type, values: Array[Any] | tuple[()] = ()) -> int:
        """How many elements an attribute has; as many of them as there is room for go to `values`."""
        count = c_int64()
        status = self._library.cudnnBackendGetAttribute(
            self.pointer, name, kind, len(values), byref(count), values or None
        )
        self._library.check(status, f"get {name.name}")
        return count.value
