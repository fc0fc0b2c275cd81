"""A cuDNN that is not there: its functions on host memory, computed by stock torch in float64, failing on command.

It reads descriptors, attributes and addresses as the real one gets them. So what reaches cuDNN is tested without a GPU,
except for what only cuDNN knows: which engines serve, and what they need.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from ctypes import c_void_p
from typing import Any

import torch
from simulated_arithmetic import DTYPES, LEGACY, NOTES, ORDER, TENSORS, at, compute, spoil

from mucudnn.convolution.problem import Role
from mucudnn.providers.cudnn.backend import AttributeName, Behavior, DescriptorKind
from mucudnn.providers.cudnn.legacy import ALGORITHMS
from mucudnn.providers.cudnn.library import Library

BAD_PARAM, NOT_SUPPORTED, EXECUTION_FAILED = 2000, 3000, 5000


class SimulatedCudnn(Library):
    """
    Attributes:
        failing: names that fail when they run: "eng1", "legacy_fft".
        compiled: the engines that are compiled at run time.
        executed: the names of what ran, in order.
        static: the engines that serve no graph of dynamic shapes.
        compilations: how often a kernel of every such engine was compiled.
        finalized: how many plans were made of every engine.
        restored: how many plans were made from their text.
        live: how many descriptors there are.
    """

    def __init__(self) -> None:
        self.path, self.version = "simulated", 92800
        self.failing: set[str] = set()
        self.compiled: set[int] = set()
        self.static: set[int] = set()
        self.compilations: Counter[int] = Counter()
        self.executed: list[str] = []
        self.finalized: Counter[int] = Counter()
        self.restored = 0
        self.streams: list[int] = []
        self._objects: dict[int, dict[int, Any]] = {}
        self._next = 4096
        self._said = b""
        for operation, target in LEGACY.items():
            setattr(self, f"cudnnConvolution{operation}", self._legacy(target))
            setattr(self, f"cudnnGetConvolution{operation}WorkspaceSize", self._legacy_workspace(target))

    @property
    def live(self) -> int:
        return len(self._objects)

    @property
    def live_plans(self) -> int:
        """How many finalized plans there are."""
        return sum(
            one.get("kind") is DescriptorKind.EXECUTION_PLAN and one["finalized"] for one in self._objects.values()
        )

    def _last_error(self, text: Any, size: int) -> None:
        text.value = self._said[: size - 1]

    def _fail(self, status: int, said: str) -> int:
        self._said = said.encode()
        return status

    def _make(self, out: Any, **attributes: Any) -> int:
        self._next += 16
        out._obj.value = self._next
        self._objects[self._next] = {"finalized": False, **attributes}  # type: ignore[dict-item]
        return 0

    def cudnnCreate(self, out: Any) -> int:
        return self._make(out)

    def cudnnSetStream(self, handle: c_void_p, stream: int) -> int:
        self.streams.append(stream)
        return 0

    # The backend API.

    def cudnnBackendCreateDescriptor(self, kind: int, out: Any) -> int:
        return self._make(out, kind=DescriptorKind(kind))

    def cudnnBackendDestroyDescriptor(self, descriptor: c_void_p) -> int:
        del self._objects[descriptor.value]  # type: ignore[arg-type]
        return 0

    def cudnnBackendSetAttribute(self, descriptor: c_void_p, name: int, kind: int, count: int, values: Any) -> int:
        object_ = self._objects[descriptor.value]  # type: ignore[index]
        if object_["finalized"] or len(values) != count:
            return self._fail(BAD_PARAM, "set after finalize, or a wrong count")
        object_[AttributeName(name)] = list(values)
        if name == AttributeName.EXECUTION_PLAN_JSON_REPRESENTATION:
            if not values.raw.isdigit():
                return self._fail(NOT_SUPPORTED, "a text of another version")
            object_[AttributeName.EXECUTION_PLAN_ENGINE_CONFIG] = [int(values.raw)]
        return 0

    def cudnnBackendFinalize(self, descriptor: c_void_p) -> int:
        object_ = self._objects[descriptor.value]  # type: ignore[index]
        if object_["finalized"]:
            return self._fail(BAD_PARAM, "finalized twice")
        if object_["kind"] is DescriptorKind.EXECUTION_PLAN and self._engine(object_) == 5:
            return self._fail(NOT_SUPPORTED, "engine 5 serves nothing")
        if object_["kind"] is DescriptorKind.ENGINECFG:
            (engine,) = object_[AttributeName.ENGINECFG_ENGINE]
            if self._objects[engine][AttributeName.ENGINE_GLOBAL_INDEX][0] in self.static and self._is_dynamic(engine):
                return self._fail(NOT_SUPPORTED, "")
        object_["finalized"] = True
        if AttributeName.EXECUTION_PLAN_JSON_REPRESENTATION in object_:
            self.restored += 1
        elif object_["kind"] is DescriptorKind.EXECUTION_PLAN:
            self.finalized[self._engine(object_)] += 1
            self._compile(object_)
        return 0

    def _is_dynamic(self, engine: int) -> bool:
        (graph,) = self._objects[engine].get(AttributeName.ENGINE_OPERATION_GRAPH, [0])
        return self._objects.get(graph, {}).get(AttributeName.OPERATIONGRAPH_IS_DYNAMIC_SHAPE_ENABLED) == [True]

    def _compile(self, plan: dict[Any, Any]) -> None:
        """Compiles a kernel, unless the plan is of dynamic shapes and has a cache with one."""
        engine, (configuration,) = self._engine(plan), plan[AttributeName.EXECUTION_PLAN_ENGINE_CONFIG]
        known = set[int]()
        if AttributeName.EXECUTION_PLAN_KERNEL_CACHE in plan:
            assert self._is_dynamic(self._objects[configuration][AttributeName.ENGINECFG_ENGINE][0])
            known = self._objects[plan[AttributeName.EXECUTION_PLAN_KERNEL_CACHE][0]].setdefault("kernels", known)
        if engine in self.compiled and engine not in known:
            self.compilations[engine] += 1
            known.add(engine)

    def cudnnBackendGetAttribute(
        self, descriptor: c_void_p, name: int, kind: int, most: int, count: Any, values: Any
    ) -> int:
        object_, found = self._objects[descriptor.value], list[Any]()  # type: ignore[index]
        if name == AttributeName.ENGINEHEUR_RESULTS:
            return self._propose(object_, most, count, values)
        if name == AttributeName.ENGINECFG_ENGINE:
            (engine,) = object_[AttributeName.ENGINECFG_ENGINE]
            self._objects[values[0]].update(self._objects[engine])
            count._obj.value = 1
            return 0
        if name == AttributeName.ENGINECFG_KNOB_CHOICES:
            found = []
        elif name == AttributeName.OPERATIONGRAPH_ENGINE_GLOBAL_COUNT:
            found = [len(NOTES)]
        elif name == AttributeName.ENGINE_NUMERICAL_NOTE:
            found = NOTES[object_[AttributeName.ENGINE_GLOBAL_INDEX][0]]
        elif name == AttributeName.ENGINE_BEHAVIOR_NOTE:
            is_compiled = object_[AttributeName.ENGINE_GLOBAL_INDEX][0] in self.compiled
            found = [Behavior.RUNTIME_COMPILATION] if is_compiled else []
        elif name == AttributeName.EXECUTION_PLAN_WORKSPACE_SIZE:
            found = [self._workspace(object_)]
        elif name == AttributeName.EXECUTION_PLAN_JSON_REPRESENTATION:
            found = [digit.encode() for digit in str(object_[AttributeName.EXECUTION_PLAN_ENGINE_CONFIG][0])]
        else:
            found = object_[AttributeName(name)]
        count._obj.value = len(found)
        for place, value in enumerate(found[:most]):
            values[place] = value
        return 0

    def _propose(self, heuristic: dict[Any, Any], most: int, count: Any, values: Any) -> int:
        """Heuristic A proposes all engines but the last of those that serve, which the fallback list has."""
        is_a = heuristic[AttributeName.ENGINEHEUR_MODE] == [3]
        engines = [1, 2, 3, 4] if is_a else [0]
        count._obj.value = len(engines)
        for place, engine in zip(range(most), engines, strict=False):
            made = c_void_p()
            self._make(ctypes.byref(made), kind=DescriptorKind.ENGINE)
            self._objects[made.value].update({AttributeName.ENGINE_GLOBAL_INDEX: [engine]})  # type: ignore[index]
            self._objects[values[place]][AttributeName.ENGINECFG_ENGINE] = [made.value]
        return 0

    def _engine(self, plan: dict[Any, Any]) -> int:
        (configuration,) = plan[AttributeName.EXECUTION_PLAN_ENGINE_CONFIG]
        (engine,) = self._objects[configuration][AttributeName.ENGINECFG_ENGINE]
        number: int = self._objects[engine][AttributeName.ENGINE_GLOBAL_INDEX][0]
        return number

    def _operation(self, plan: dict[Any, Any]) -> dict[Any, Any]:
        (configuration,) = plan[AttributeName.EXECUTION_PLAN_ENGINE_CONFIG]
        (engine,) = self._objects[configuration][AttributeName.ENGINECFG_ENGINE]
        (graph,) = self._objects[engine][AttributeName.ENGINE_OPERATION_GRAPH]
        (operation,) = self._objects[graph][AttributeName.OPERATIONGRAPH_OPS]
        return self._objects[operation]

    def _parts(self, operation: dict[Any, Any]) -> tuple[Role, float, dict[Any, Any], list[dict[Any, Any]]]:
        target, first = TENSORS[operation["kind"]]
        convolution = self._objects[operation[first + 2][0]]
        tensors = [self._objects[operation[first + place][0]] for place in (4, 3, 5)]  # x, w, y of each
        return target, operation[first + 1][0], convolution, tensors

    def _workspace(self, plan: dict[Any, Any]) -> int:
        _, _, _, (x, _, _) = self._parts(self._operation(plan))
        samples: int = x[AttributeName.TENSOR_DIMENSIONS][0]
        return 1024 * samples if self._engine(plan) == 1 else 0

    def cudnnBackendExecute(self, handle: c_void_p, plan: c_void_p, pack: c_void_p) -> int:
        described = self._objects[plan.value]  # type: ignore[index]
        given = self._objects[pack.value]  # type: ignore[index]
        name = f"eng{self._engine(described)}"
        if name in self.failing:
            return self._fail(EXECUTION_FAILED, f"{name} was told to fail")
        target, beta, convolution, tensors = self._parts(self._operation(described))
        addresses = dict(
            zip(
                given[AttributeName.VARIANT_PACK_UNIQUE_IDS],
                given[AttributeName.VARIANT_PACK_DATA_POINTERS],
                strict=True,
            )
        )
        held = []
        for tensor in tensors:
            address = addresses[tensor[AttributeName.TENSOR_UNIQUE_ID][0]]
            if address % tensor[AttributeName.TENSOR_BYTE_ALIGNMENT][0]:
                return self._fail(EXECUTION_FAILED, "an address is not aligned as the plan was told")
            dtype = DTYPES[tensor[AttributeName.TENSOR_DATA_TYPE][0]]
            held.append(
                at(address, dtype, tensor[AttributeName.TENSOR_DIMENSIONS], tensor[AttributeName.TENSOR_STRIDES])
            )
        spoil(given[AttributeName.VARIANT_PACK_WORKSPACE][0], self._workspace(described))
        names = (AttributeName.CONVOLUTION_PRE_PADDINGS, AttributeName.CONVOLUTION_POST_PADDINGS)
        geometry = (AttributeName.CONVOLUTION_FILTER_STRIDES, AttributeName.CONVOLUTION_DILATIONS)
        compute(target, held, *(convolution[n] for n in (*names, *geometry)), beta)
        self.executed.append(name)
        return 0

    # The older functions.

    def cudnnCreateTensorDescriptor(self, out: Any) -> int:
        return self._make(out)

    cudnnCreateFilterDescriptor = cudnnCreateConvolutionDescriptor = cudnnCreateTensorDescriptor

    def cudnnDestroyTensorDescriptor(self, descriptor: c_void_p) -> int:
        return self.cudnnBackendDestroyDescriptor(descriptor)

    cudnnDestroyFilterDescriptor = cudnnDestroyConvolutionDescriptor = cudnnDestroyTensorDescriptor

    def cudnnSetTensorNdDescriptor(self, descriptor: c_void_p, dtype: int, dims: int, shape: Any, steps: Any) -> int:
        assert len(shape) == len(steps) == dims
        self._objects[descriptor.value].update(dtype=dtype, shape=list(shape), steps=list(steps))  # type: ignore
        return 0

    def cudnnSetFilterNdDescriptor(self, descriptor: c_void_p, dtype: int, layout: int, dims: int, shape: Any) -> int:
        formats = {0: torch.contiguous_format, 1: {4: torch.channels_last, 5: torch.channels_last_3d}[dims]}
        steps = torch.empty(list(shape), device="meta").contiguous(memory_format=formats[layout]).stride()
        return self.cudnnSetTensorNdDescriptor(descriptor, dtype, dims, shape, steps)

    def cudnnSetConvolutionNdDescriptor(self, descriptor: c_void_p, dims: int, *arguments: Any) -> int:
        padding, stride, dilation, mode, compute = arguments
        assert len(padding) == len(stride) == len(dilation) == dims and mode == 1 and compute in (0, 1)
        self._objects[descriptor.value].update(  # type: ignore[call-overload]
            padding=list(padding), stride=list(stride), dilation=list(dilation)
        )
        return 0

    def cudnnSetConvolutionGroupCount(self, descriptor: c_void_p, groups: int) -> int:
        self._objects[descriptor.value]["groups"] = groups  # type: ignore[index]
        return 0

    def cudnnSetConvolutionMathType(self, descriptor: c_void_p, math_type: int) -> int:
        self._objects[descriptor.value]["math"] = math_type  # type: ignore[index]
        return 0

    def _legacy_workspace(self, target: Role) -> Any:
        def workspace_size(handle: Any, a: Any, b: Any, convolution: Any, c: Any, number: int, out: Any) -> int:
            if number == ALGORITHMS[target].get("winograd"):
                return self._fail(NOT_SUPPORTED, "not on this card")
            out._obj.value = self._legacy_bytes(target, (a, b, c), number)
            return 0

        return workspace_size

    def _legacy_bytes(self, target: Role, descriptors: tuple[c_void_p, ...], number: int) -> int:
        x = dict(zip(ORDER[target], descriptors, strict=True))[Role.X]
        samples: int = self._objects[x.value]["shape"][0]  # type: ignore[index]
        return 512 * samples if number == ALGORITHMS[target]["fft"] else 0

    def _legacy(self, target: Role) -> Any:
        def run(handle: Any, alpha: Any, *arguments: Any) -> int:
            a, a_at, b, b_at, convolution, number, workspace, size, beta, c, c_at = arguments
            (name,) = (f"legacy_{name}" for name, known in ALGORITHMS[target].items() if known == number)
            if name in self.failing:
                return self._fail(EXECUTION_FAILED, f"{name} was told to fail")
            needed = self._legacy_bytes(target, (a, b, c), number)
            if size < needed or alpha._obj.value != 1.0:
                return self._fail(BAD_PARAM, "too little workspace, or an alpha")
            held: dict[Role, torch.Tensor] = {}
            for role, descriptor, address in zip(ORDER[target], (a, b, c), (a_at, b_at, c_at), strict=True):
                known = self._objects[descriptor.value]
                held[role] = at(address, DTYPES[known["dtype"]], known["shape"], known["steps"])
            spoil(workspace, needed)
            geometry = self._objects[convolution.value]
            assert geometry["groups"] == held[Role.X].shape[1] // held[Role.W].shape[1]
            padding = geometry["padding"]
            tensors = [held[role] for role in Role]
            compute(target, tensors, padding, padding, geometry["stride"], geometry["dilation"], beta._obj.value)
            self.executed.append(name)
            return 0

        return run
