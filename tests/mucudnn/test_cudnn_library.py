"""The real cuDNN, as far as it goes without a GPU: enums, structures, errors, and plans finalized for an H200."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_int, c_void_p
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cudnn_wheels import H200, opened, wheel_library
from hypothesis import given, settings
from problems import problems

from benchmarks.gpu.steps.engines import card_of
from mucudnn.convolution.problem import ConvProblem, Direction, Role
from mucudnn.optimizer import Division, Option
from mucudnn.providers.cudnn import backend, legacy, library
from mucudnn.providers.cudnn.backend import (
    AttributeName,
    Behavior,
    Descriptor,
    DescriptorKind,
    HeuristicMode,
    NumericalNote,
    Type,
)
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.form import form
from mucudnn.providers.cudnn.graph import Configuration, OperationGraph, PlannedCard
from mucudnn.providers.cudnn.library import CudnnError, Library, Unavailable
from mucudnn.timing.measurement import synthetic_operands
from mucudnn.timing.schedule import Schedule

CONV2 = ConvProblem.of_convolution(  # AlexNet's
    Direction.FORWARD, (64, 64, 27, 27), (192, 64, 5, 5), stride=(1, 1), padding=(2, 2), dilation=(1, 1)
)
MIB = 2**20


@pytest.fixture(scope="session")
def cudnn(tmp_path_factory: pytest.TempPathFactory) -> Library:
    if torch.backends.cudnn.is_available():
        pytest.skip("torch brings a cuDNN of its own, beside which no other can be loaded")
    try:
        return wheel_library(tmp_path_factory.mktemp("libcuda"))
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def h200(cudnn: Library) -> PlannedCard:
    return card_of(cudnn, H200)


@pytest.fixture(scope="session")
def header(cudnn: Library) -> dict[str, int]:
    """The enumerators of cuDNN's headers, by name."""
    found: dict[str, int] = {}
    for path in (Path(cudnn.path).parents[1] / "include").glob("cudnn_*.h"):
        pattern = r"\b(CUDNN_\w+)(?:\s+CUDNN_DEPRECATED_ENUM)?\s*=\s*(-?\d+)\b"
        found |= {name: int(value) for name, value in re.findall(pattern, path.read_text())}
    return found


class NoCard:
    """Plans for a device that is not there; what would run is only counted."""

    def __init__(self, library: Library, device: PlannedCard) -> None:
        self.library, self.device = library, device
        self._scratch = torch.empty(64 * MIB, dtype=torch.uint8)

    def planning(self) -> AbstractContextManager[PlannedCard]:
        return nullcontext(self.device)

    def handle(self) -> c_void_p:
        return c_void_p(1)

    def scratch(self, size: int) -> torch.Tensor:
        return self._scratch[:size]

    def is_current(self) -> bool:
        return True

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()


@pytest.fixture
def engines(cudnn: Library, h200: PlannedCard) -> Iterator[Engines]:
    before = torch.backends.cudnn.conv.fp32_precision
    yield Engines(NoCard(cudnn, h200))
    torch.backends.cudnn.conv.fp32_precision = before


def test_enumerators_are_those_of_the_headers(header: dict[str, int]) -> None:
    wanted = {f"CUDNN_BACKEND_{kind.name}_DESCRIPTOR": kind for kind in DescriptorKind}
    wanted |= {f"CUDNN_ATTR_{name.name}": name for name in AttributeName}
    wanted |= {f"CUDNN_TYPE_{kind.name}": kind for kind in Type}
    wanted |= {f"CUDNN_NUMERICAL_NOTE_{note.name}": note for note in NumericalNote}
    wanted |= {f"CUDNN_BEHAVIOR_NOTE_{note.name}": note for note in Behavior}
    wanted |= {f"CUDNN_HEUR_MODE_{mode.name}": mode for mode in HeuristicMode}
    names = {"float32": "FLOAT", "float64": "DOUBLE", "float16": "HALF", "bfloat16": "BFLOAT16"}
    wanted |= {f"CUDNN_DATA_{names[dtype]}": value for dtype, value in backend.DATA_TYPES.items()}
    wanted |= {"CUDNN_CROSS_CORRELATION": backend.CROSS_CORRELATION}
    wanted |= {"CUDNN_DEFAULT_MATH": legacy.DEFAULT_MATH, "CUDNN_TENSOR_OP_MATH": legacy.TENSOR_OP_MATH}
    wanted |= {"CUDNN_FMA_MATH": legacy.FMA_MATH, "CUDNN_TENSOR_NCHW": legacy.NCHW, "CUDNN_TENSOR_NHWC": legacy.NHWC}
    for target, prefix in ((Role.Y, "FWD"), (Role.X, "BWD_DATA"), (Role.W, "BWD_FILTER")):
        for name, number in legacy.ALGORITHMS[target].items():
            wanted[f"CUDNN_CONVOLUTION_{prefix}_ALGO_{name.upper()}"] = number
    assert {name: header.get(name) for name in wanted} == {name: int(value) for name, value in wanted.items()}


def test_versions_are_read_and_unknown_ones_refused(cudnn: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cudnn.version // 10000 == 9
    assert library.spelled(92000) == "9.20.0"
    monkeypatch.setattr(library, "LEAST", 99900)
    with pytest.raises(Unavailable, match=r"9\.99\.0 and later"):
        opened(cudnn.path)


def test_without_a_gpu_no_handle_is_made(cudnn: Library) -> None:
    with pytest.raises(CudnnError, match=r"cudnnCreate: cuDNN status 1001: .+") as caught:
        cudnn.created("cudnnCreate")
    assert caught.value.status == 1001
    assert "\n" not in str(caught.value)


def test_misuse_of_a_descriptor_is_reported_in_cudnns_words(cudnn: Library) -> None:
    with pytest.raises(CudnnError, match="finalize TENSOR: cuDNN status 2000"):
        Descriptor(cudnn, DescriptorKind.TENSOR).finalize()
    with pytest.raises(CudnnError, match="set TENSOR_DIMENSIONS"):
        Descriptor(cudnn, DescriptorKind.TENSOR).set(AttributeName.TENSOR_DIMENSIONS, Type.DATA_TYPE, 1)
    with pytest.raises(CudnnError, match="get EXECUTION_PLAN_WORKSPACE_SIZE"):
        Descriptor(cudnn, DescriptorKind.EXECUTION_PLAN).numbers(
            AttributeName.EXECUTION_PLAN_WORKSPACE_SIZE, Type.INT64
        )


def test_a_device_has_properties(cudnn: Library) -> None:
    device = card_of(cudnn, H200)
    assert device.properties is not None
    assert json.loads(device.properties.text(AttributeName.DEVICEPROP_JSON_REPRESENTATION)) == H200


def test_an_unknown_device_is_refused(cudnn: Library) -> None:
    with pytest.raises(CudnnError, match="finalize DEVICEPROP"):
        card_of(cudnn, {"deviceName": "abacus"})


@settings(max_examples=40)
@given(problem=problems(dtypes=("float64", "float32", "float16", "bfloat16")))
def test_any_problem_is_a_graph_with_an_engine(problem: ConvProblem, cudnn: Library, h200: PlannedCard) -> None:
    put = form(problem)
    if put is None:
        return
    graph = OperationGraph(cudnn, h200, put, accumulate=problem.target is Role.W)
    assert graph.plan(graph.engine(0)).workspace >= 0  # engine 0 serves everything


@settings(max_examples=40)
@given(problem=problems(dtypes=("float32", "float16")))
def test_legacy_descriptors_agree_on_the_output_shape(problem: ConvProblem, cudnn: Library) -> None:
    put = form(problem)
    if put is None or not put.is_symmetric:
        return
    described = legacy.Described(cudnn, put, legacy.FMA_MATH)
    dims = len(put.shapes[0])
    found, groups, math_type = (c_int * dims)(), c_int(), c_int()
    x, w = described.tensors[Role.X], described.tensors[Role.W]
    status = cudnn.cudnnGetConvolutionNdForwardOutputDim(described.convolution, x, w, dims, found)
    cudnn.check(status, "output shape")
    assert tuple(found) == put.shapes[2]
    cudnn.check(cudnn.cudnnGetConvolutionGroupCount(described.convolution, groups), "groups")
    cudnn.check(cudnn.cudnnGetConvolutionMathType(described.convolution, math_type), "math type")
    assert (groups.value, math_type.value) == (problem.groups, legacy.FMA_MATH)


@pytest.mark.parametrize("direction", list(Direction))
def test_accumulating_plans_finalize_where_others_do(direction: Direction, cudnn: Library, h200: PlannedCard) -> None:
    put = form(replace(CONV2, direction=direction))
    assert put is not None

    def serving(accumulate: bool) -> set[int]:
        graph = OperationGraph(cudnn, h200, put, accumulate)
        found = set()
        for index in range(graph.engines):
            try:
                graph.plan(graph.engine(index))
                found.add(index)
            except CudnnError:
                pass
        return found

    assert serving(False) == serving(True) != set()


def test_workspaces_grow_with_the_batch(engines: Engines) -> None:
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    names = engines.algorithms(CONV2)
    sizes = {
        name: [engines.workspace(CONV2.with_extent(n), name) for n in (16, 64, 256)]
        for name in names
        if engines.serves(CONV2.with_extent(256), name) and engines.serves(CONV2.with_extent(16), name)
    }
    growing = {name: row for name, row in sizes.items() if row[2] > 40 * MIB}
    assert growing
    for small, middle, large in growing.values():
        assert 3 * small < middle and 3 * middle < large


def test_channels_last_half_needs_almost_nothing(engines: Engines) -> None:
    problem = replace(CONV2, dtype="float16", formats=("channels_last",) * 3)
    assert statistics.median(engines.workspace(problem, name) for name in engines.algorithms(problem)) < MIB


def test_strict_float32_drops_tensor_cores(engines: Engines, cudnn: Library, h200: PlannedCard) -> None:
    def notes(names: object) -> set[int]:
        put = form(CONV2)
        graph = OperationGraph(cudnn, h200, put, False)
        return {note for name in names for note in graph.engine(Configuration.parsed(name).engine).notes}

    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert NumericalNote.TENSOR_CORE in notes(engines.algorithms(CONV2))
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    assert engines.algorithms(CONV2)
    assert not notes(engines.algorithms(CONV2)) & {NumericalNote.TENSOR_CORE, NumericalNote.DOWN_CONVERT_INPUTS}
    assert any("TF32" in reason for reason in engines.refused(CONV2).values())


def test_alignment_decides_who_serves(cudnn: Library, h200: PlannedCard) -> None:
    half = replace(CONV2, dtype="float16", formats=("channels_last",) * 3)

    def serving(alignment: int) -> int:
        graph = OperationGraph(cudnn, h200, form(replace(half, alignment=alignment)), False)
        count = 0
        for index in range(graph.engines):
            try:
                graph.plan(graph.engine(index))
                count += 1
            except CudnnError:
                pass
        return count

    assert 0 < serving(2) < serving(16)


def test_a_division_makes_the_calls_it_should(
    engines: Engines, cudnn: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(cudnn, "cudnnBackendExecute", lambda *arguments: calls.append(arguments) or 0)
    problem = replace(CONV2, direction=Direction.BACKWARD_FILTER, x_shape=(4, 64, 27, 27), y_shape=(4, 192, 27, 27))
    division = Division(tuple(Option(2, "eng1", 0.0, 0) for _ in range(2)))
    schedule = Schedule(problem, division, {"eng1": engines})
    operands = synthetic_operands(problem)
    schedule.run(operands)
    schedule.run(operands)
    assert len(calls) == 4
    plans, packs = [[call[place].value for call in calls] for place in (1, 2)]  # type: ignore[attr-defined]
    assert plans[:2] == plans[2:] and plans[0] != plans[1]  # the second adds to the first
    assert packs[:2] == packs[2:] and packs[0] != packs[1]
