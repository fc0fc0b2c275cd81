"""One convolution in cuDNN's graph API, its engines, and the plans that are made from them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from ctypes import c_void_p
from dataclasses import dataclass
from typing import NamedTuple, Self

from mucudnn.convolution.problem import Role
from mucudnn.process import renewed
from mucudnn.providers.cudnn.backend import (
    CROSS_CORRELATION,
    DATA_TYPES,
    AttributeName,
    Behavior,
    Descriptor,
    DescriptorKind,
    HeuristicMode,
    NumericalNote,
    Type,
)
from mucudnn.providers.cudnn.form import Form
from mucudnn.providers.cudnn.library import CudnnError, Library

UNIQUE_IDS = (1, 2, 3)  # The ids of x, w and y.

MOST_CONFIGURATIONS = 128  # Engine configurations of one heuristic that are read.

MOST_KNOBS = 64

MOST_PACKS = 256
"""Variant packs that a plan keeps. Torch's allocator gives a training step the addresses of the step before."""


_OPERATIONS = {
    Role.Y: ("FORWARD", "FORWARD", ("X", "W", "Y")),
    Role.X: ("BACKWARD_DATA", "BWD_DATA", ("DX", "W", "DY")),
    Role.W: ("BACKWARD_FILTER", "BWD_FILTER", ("X", "DW", "DY")),
}
"""cuDNN's words for each tensor that may be computed: in the kind of its descriptor, in the names of attributes, and
for x, w and y. A transposed convolution is one of these with its ends exchanged."""


class Configuration(NamedTuple):
    """The name of one algorithm: an engine with choices of its knobs, as (type, value); others have their defaults."""

    engine: int
    knobs: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        """As cuDNN's own tools spell it: "eng17_k2=3_k13=0"."""
        return "_".join((f"eng{self.engine}", *(f"k{kind}={value}" for kind, value in self.knobs)))

    @classmethod
    def parsed(cls, text: str) -> Self:
        engine, *knobs = text.removeprefix("eng").split("_k")
        pairs = (knob.split("=") for knob in knobs)
        return cls(int(engine), tuple((int(kind), int(value)) for kind, value in pairs))


class OperationGraph:
    """The operation graph of one convolution: target = conv(the other two) + beta * target.

    Attributes:
        engines: how many engines cuDNN numbers for it; most of them do not serve it.
    """

    def __init__(
        self, library: Library, device: PlannedCard, form: Form, accumulate: bool, is_dynamic: bool = False
    ) -> None:
        """
        Args:
            form: the convolution; the addresses of all three tensors are multiples of its problem's alignment.
            accumulate: whether beta is 1.
            is_dynamic: whether kernels are to serve other shapes, too. Not all engines serve such a graph.

        Raises:
            CudnnError: where cuDNN knows no such convolution.
        """
        self._library = library
        self._device = device
        problem = form.problem
        # Half types are multiplied exactly and added up in float32, as in torch.
        compute = DATA_TYPES["float64" if problem.dtype == "float64" else "float32"]
        scalar = Type.DOUBLE if problem.dtype == "float64" else Type.FLOAT
        convolution = (
            Descriptor(library, DescriptorKind.CONVOLUTION)
            .set(AttributeName.CONVOLUTION_COMP_TYPE, Type.DATA_TYPE, compute)
            .set(AttributeName.CONVOLUTION_CONV_MODE, Type.CONVOLUTION_MODE, CROSS_CORRELATION)
            .set(AttributeName.CONVOLUTION_SPATIAL_DIMS, Type.INT64, len(form.stride))
            .set(AttributeName.CONVOLUTION_PRE_PADDINGS, Type.INT64, *form.padding)
            .set(AttributeName.CONVOLUTION_POST_PADDINGS, Type.INT64, *form.padding_after)
            .set(AttributeName.CONVOLUTION_DILATIONS, Type.INT64, *form.dilation)
            .set(AttributeName.CONVOLUTION_FILTER_STRIDES, Type.INT64, *form.stride)
            .finalize()
        )
        kind, word, tensors = _OPERATIONS[problem.target]
        parts = "CONV_DESC", "ALPHA", "BETA", *tensors
        name = {part: AttributeName[f"OPERATION_CONVOLUTION_{word}_{part}"] for part in parts}
        operation = Descriptor(library, DescriptorKind[f"OPERATION_CONVOLUTION_{kind}"])
        operation.set(name["CONV_DESC"], Type.BACKEND_DESCRIPTOR, convolution)
        operation.set(name["ALPHA"], scalar, 1.0)
        operation.set(name["BETA"], scalar, 1.0 if accumulate else 0.0)
        for part, uid, shape, strides in zip(tensors, UNIQUE_IDS, form.shapes, form.strides, strict=True):
            tensor = (
                Descriptor(library, DescriptorKind.TENSOR)
                .set(AttributeName.TENSOR_DATA_TYPE, Type.DATA_TYPE, DATA_TYPES[problem.dtype])
                .set(AttributeName.TENSOR_DIMENSIONS, Type.INT64, *shape)
                .set(AttributeName.TENSOR_STRIDES, Type.INT64, *strides)
                .set(AttributeName.TENSOR_UNIQUE_ID, Type.INT64, uid)
                .set(AttributeName.TENSOR_BYTE_ALIGNMENT, Type.INT64, problem.alignment)
                .finalize()
            )
            operation.set(name[part], Type.BACKEND_DESCRIPTOR, tensor)
        operation.finalize()
        self._graph = Descriptor(library, DescriptorKind.OPERATIONGRAPH)
        self._graph.set(AttributeName.OPERATIONGRAPH_OPS, Type.BACKEND_DESCRIPTOR, operation)
        if is_dynamic:
            self._graph.set(AttributeName.OPERATIONGRAPH_IS_DYNAMIC_SHAPE_ENABLED, Type.BOOLEAN, True)
        if device.handle is not None:
            self._graph.set(AttributeName.OPERATIONGRAPH_HANDLE, Type.HANDLE, device.handle.value)
        self._graph.finalize()
        (self.engines,) = self._graph.numbers(AttributeName.OPERATIONGRAPH_ENGINE_GLOBAL_COUNT, Type.INT64)

    def proposed(self, mode: HeuristicMode) -> list[Configuration]:
        """The proposals of cuDNN's heuristic, the best first; empty if it does not know the convolution."""
        heuristic = Descriptor(self._library, DescriptorKind.ENGINEHEUR)
        heuristic.set(AttributeName.ENGINEHEUR_OPERATION_GRAPH, Type.BACKEND_DESCRIPTOR, self._graph)
        heuristic.set(AttributeName.ENGINEHEUR_MODE, Type.HEUR_MODE, mode)
        if self._device.properties is not None:
            heuristic.set(AttributeName.ENGINEHEUR_DEVICEPROP, Type.BACKEND_DESCRIPTOR, self._device.properties)
        try:
            heuristic.finalize()
        except CudnnError:
            return []
        count = min(heuristic.count(AttributeName.ENGINEHEUR_RESULTS, Type.BACKEND_DESCRIPTOR), MOST_CONFIGURATIONS)
        made = [Descriptor(self._library, DescriptorKind.ENGINECFG) for _ in range(count)]
        return [self._configuration(one) for one in heuristic.descriptors(AttributeName.ENGINEHEUR_RESULTS, made)]

    def _configuration(self, described: Descriptor) -> Configuration:
        made = [Descriptor(self._library, DescriptorKind.ENGINE)]
        engines = described.descriptors(AttributeName.ENGINECFG_ENGINE, made)
        (engine,) = engines[0].numbers(AttributeName.ENGINE_GLOBAL_INDEX, Type.INT64)
        made = [Descriptor(self._library, DescriptorKind.KNOB_CHOICE) for _ in range(MOST_KNOBS)]
        knobs = []
        for choice in described.descriptors(AttributeName.ENGINECFG_KNOB_CHOICES, made):
            (kind,) = choice.numbers(AttributeName.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE)
            (value,) = choice.numbers(AttributeName.KNOB_CHOICE_KNOB_VALUE, Type.INT64)
            knobs.append((kind, value))
        return Configuration(engine, tuple(knobs))

    def engine(self, index: int) -> Engine:
        """
        Raises:
            CudnnError: where the engine does not serve this convolution; few say so before a plan is made.
        """
        descriptor = Descriptor(self._library, DescriptorKind.ENGINE)
        descriptor.set(AttributeName.ENGINE_OPERATION_GRAPH, Type.BACKEND_DESCRIPTOR, self._graph)
        descriptor.set(AttributeName.ENGINE_GLOBAL_INDEX, Type.INT64, index)
        if self._device.properties is not None:
            descriptor.set(AttributeName.ENGINE_DEVICEPROP, Type.BACKEND_DESCRIPTOR, self._device.properties)
        descriptor.finalize()
        notes = descriptor.numbers(AttributeName.ENGINE_NUMERICAL_NOTE, Type.NUMERICAL_NOTE, len(NumericalNote))
        behavior = descriptor.numbers(AttributeName.ENGINE_BEHAVIOR_NOTE, Type.BEHAVIOR_NOTE, len(Behavior))
        return Engine(descriptor, frozenset(notes), frozenset(behavior))

    def kernel_cache(self) -> Descriptor:
        """An empty cache for kernels of plans of such dynamic graphs, which differ in their shapes."""
        made = Descriptor(self._library, DescriptorKind.KERNEL_CACHE)
        return made.set(AttributeName.KERNEL_CACHE_OPERATION_GRAPH, Type.BACKEND_DESCRIPTOR, self._graph).finalize()

    def plan(
        self, engine: Engine, knobs: Sequence[tuple[int, int]] = (), kernels: Descriptor | None = None
    ) -> ExecutionPlan:
        """
        ``kernels``: the `kernel_cache` that a compiled kernel is taken from, or added to.

        Raises:
            CudnnError: where the engine does not serve this convolution with these knobs.
        """
        configuration = Descriptor(self._library, DescriptorKind.ENGINECFG)
        configuration.set(AttributeName.ENGINECFG_ENGINE, Type.BACKEND_DESCRIPTOR, engine.descriptor)
        choices = [
            Descriptor(self._library, DescriptorKind.KNOB_CHOICE)
            .set(AttributeName.KNOB_CHOICE_KNOB_TYPE, Type.KNOB_TYPE, kind)
            .set(AttributeName.KNOB_CHOICE_KNOB_VALUE, Type.INT64, value)
            .finalize()
            for kind, value in knobs
        ]
        if choices:
            configuration.set(AttributeName.ENGINECFG_KNOB_CHOICES, Type.BACKEND_DESCRIPTOR, *choices)
        configuration.finalize()
        descriptor = Descriptor(self._library, DescriptorKind.EXECUTION_PLAN)
        descriptor.set(AttributeName.EXECUTION_PLAN_ENGINE_CONFIG, Type.BACKEND_DESCRIPTOR, configuration)
        if kernels is not None:
            descriptor.set(AttributeName.EXECUTION_PLAN_KERNEL_CACHE, Type.BACKEND_DESCRIPTOR, kernels)
        if self._device.handle is not None:
            descriptor.set(AttributeName.EXECUTION_PLAN_HANDLE, Type.HANDLE, self._device.handle.value)
        if self._device.properties is not None:
            descriptor.set(AttributeName.EXECUTION_PLAN_DEVICEPROP, Type.BACKEND_DESCRIPTOR, self._device.properties)
        descriptor.finalize()
        return ExecutionPlan(self._library, descriptor)

    def restored(self, text: str) -> ExecutionPlan:
        """A plan of this graph, restored from its `text` with the kernels that were compiled for it.

        Raises:
            CudnnError: where cuDNN does not take it, such as that of another version.
        """
        descriptor = Descriptor(self._library, DescriptorKind.EXECUTION_PLAN)
        if self._device.handle is not None:
            descriptor.set(AttributeName.EXECUTION_PLAN_HANDLE, Type.HANDLE, self._device.handle.value)
        descriptor.set_text(AttributeName.EXECUTION_PLAN_JSON_REPRESENTATION, text.encode())
        return ExecutionPlan(self._library, descriptor.finalize())


@dataclass(frozen=True)
class Engine:
    """An engine of one graph."""

    descriptor: Descriptor
    notes: frozenset[int]  # Values of `NumericalNote`, and of later ones.
    behavior: frozenset[int]  # Values of `Behavior`, and of later ones.


class ExecutionPlan:
    """A finalized plan, which can be run.

    Attributes:
        workspace: bytes.
    """

    def __init__(self, library: Library, descriptor: Descriptor) -> None:
        self._library = library
        self._descriptor, self._pointer = descriptor, descriptor.pointer
        self._execute = library.cudnnBackendExecute
        self._packs: dict[tuple[int, int, int, int], Descriptor] = {}
        self._lock = renewed(threading.Lock())
        (self.workspace,) = descriptor.numbers(AttributeName.EXECUTION_PLAN_WORKSPACE_SIZE, Type.INT64)

    @property
    def text(self) -> str:
        """The plan in cuDNN's own notation, from which `OperationGraph.restored` makes it again."""
        return self._descriptor.text(AttributeName.EXECUTION_PLAN_JSON_REPRESENTATION)

    def execute(self, handle: c_void_p, x: int, w: int, y: int, workspace: int) -> None:
        """Enqueues the convolution on the handle's stream, for one thread at a time: not all plans are thread-safe.

        Args:
            x, w, y, workspace: addresses.

        Raises:
            CudnnError: where cuDNN refuses.
        """
        addresses = x, w, y, workspace
        with self._lock:
            pack = self._packs.get(addresses) or self._packed(addresses)
            status = self._execute(handle, self._pointer, pack.pointer)
        if status:
            self._library.check(status, "execute")

    def _packed(self, addresses: tuple[int, int, int, int]) -> Descriptor:
        pack = (
            Descriptor(self._library, DescriptorKind.VARIANT_PACK)
            .set(AttributeName.VARIANT_PACK_UNIQUE_IDS, Type.INT64, *UNIQUE_IDS)
            .set(AttributeName.VARIANT_PACK_DATA_POINTERS, Type.VOID_PTR, *addresses[:3])
            .set(AttributeName.VARIANT_PACK_WORKSPACE, Type.VOID_PTR, addresses[3])
            .finalize()
        )
        if len(self._packs) >= MOST_PACKS:
            self._packs.clear()
        self._packs[addresses] = pack
        return pack


@dataclass(frozen=True)
class PlannedCard:
    """Exactly one of the two is given."""

    handle: c_void_p | None = None  # A cuDNN handle on the card.
    properties: Descriptor | None = None  # A DEVICEPROP descriptor of a card that need not be here.
