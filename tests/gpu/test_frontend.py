"""NVIDIA's own frontend of cuDNN, where its wheel is at hand, finds the same engines, workspaces and numbers.

`pip install --no-deps nvidia-cudnn-frontend`. This also runs on the null card.
"""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from algorithms import ARMS, launch, on_device, precision, problem_of
from references import operands

from mucudnn.convolution.problem import ConvProblem, Direction, Role
from mucudnn.providers.cudnn.backend import Behavior, HeuristicMode, NumericalNote
from mucudnn.providers.cudnn.card import Card
from mucudnn.providers.cudnn.engines import Engines
from mucudnn.providers.cudnn.form import form
from mucudnn.providers.cudnn.graph import Configuration, Engine, OperationGraph
from mucudnn.providers.cudnn.library import CudnnError

MOST = 8
"""Plans that are compared, of those ranked best; plans of engines that are compiled at run time take seconds."""

CONVOLUTIONS = {
    Role.Y: ("conv_fprop", {"image": Role.X, "weight": Role.W}),
    Role.X: ("conv_dgrad", {"loss": Role.Y, "filter": Role.W}),
    Role.W: ("conv_wgrad", {"image": Role.X, "loss": Role.Y}),
}
TYPES = {"float64": "DOUBLE", "float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}


def proposed(frontend: Any, handle: Any, problem: ConvProblem) -> tuple[Any, dict[Role, Any]]:
    """The frontend's graph of a problem, which has what cuDNN's heuristic proposes, and the graph's tensors."""
    put = form(problem)
    assert put is not None
    dtype, wide = (getattr(frontend.data_type, TYPES[name]) for name in (problem.dtype, "float32"))
    graph = frontend.pygraph(handle=handle, io_data_type=dtype, intermediate_data_type=wide, compute_data_type=wide)
    about = dict(zip(Role, zip(put.shapes, put.strides, strict=True), strict=True))
    method, given = CONVOLUTIONS[problem.target]
    tensors = {
        role: graph.tensor(name=str(role), dim=[*about[role][0]], stride=[*about[role][1]], data_type=dtype)
        for role in given.values()
    }
    target = tensors[problem.target] = getattr(graph, method)(
        **{name: tensors[role] for name, role in given.items()},
        **{"pre_padding": [*put.padding], "post_padding": [*put.padding_after]},
        **{"stride": [*put.stride], "dilation": [*put.dilation]},
    )
    shape, strides = about[problem.target]
    target.set_output(True).set_dim([*shape]).set_stride([*strides]).set_data_type(dtype)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([frontend.heur_mode.A])
    return graph, tensors


@pytest.mark.parametrize("arm", ["float32", "float16", "float16 channels_last"])
@pytest.mark.parametrize("geometry", ["3x3", "3-D"])
@pytest.mark.parametrize("direction", Direction)
def test_plans_are_those_of_nvidias_frontend(direction: Direction, geometry: str, arm: str, cuda: torch.device) -> None:
    frontend: Any = pytest.importorskip("cudnn", reason="no wheel of nvidia-cudnn-frontend")
    # The library that torch has loaded, by its name.
    frontend._pybind_module._set_dlhandle_cudnn(ctypes.CDLL("libcudnn.so.9")._handle)
    problem = problem_of(geometry, direction, ARMS[arm])
    description = form(problem)
    assert description is not None
    handle = frontend.create_handle()
    theirs, tensors = proposed(frontend, handle, problem)
    card = Card(cuda.index or 0)
    planned: dict[str, tuple[int | None, bool]] = {}
    with precision(ARMS[arm]):
        with card.planning() as here:
            ours = OperationGraph(card.library, here, description, accumulate=False)
            configurations = {str(each): each for each in ours.proposed(HeuristicMode.A)}
            indices = {theirs.get_plan_name_at_index(at): at for at in range(theirs.get_execution_plan_count())}
            # In the same order, of the same engines; it leaves out some of an engine's configurations.
            assert [*indices] == [name for name in configurations if name in indices]
            assert {Configuration.parsed(name).engine for name in indices} == {
                e.engine for e in configurations.values()
            }
            for name in indices:
                engine = ours.engine(configurations[name].engine)
                if Behavior.RUNTIME_COMPILATION not in engine.behavior and len(planned) < MOST:
                    size = workspace(ours, engine, configurations[name])
                    planned[name] = size, NumericalNote.NONDETERMINISTIC in engine.notes
        assert any(size is not None for size, _ in planned.values())
        for name, (size, varies) in planned.items():
            if size is None:
                with pytest.raises(frontend.cudnnGraphNotSupportedError):
                    theirs.build_plan_at_index(indices[name])
                continue
            theirs.build_plan_at_index(indices[name])
            assert theirs.get_workspace_size_plan_at_index(indices[name]) == size, name
            expected, found = (on_device(problem, operands(problem), cuda) for _ in range(2))
            scratch = torch.empty(max(size, 1), dtype=torch.uint8, device=cuda)
            pack = {tensors[role]: getattr(expected, role) for role in Role}
            theirs.execute_plan_at_index(pack, scratch, indices[name], handle=handle)
            assert launch(Engines(card), problem, name, found, (problem.extent,))
            results = found.target(problem), expected.target(problem)
            torch.testing.assert_close(*results, **({} if varies else {"rtol": 0, "atol": 0}), msg=name)
    frontend.destroy_handle(handle)


def workspace(graph: OperationGraph, engine: Engine, configuration: Configuration) -> int | None:
    """In bytes; None where the engine does not serve the graph."""
    try:
        return graph.plan(engine, configuration.knobs).workspace
    except CudnnError:
        return None
