"""The algorithm of CONTRIBUTING.md, executed as it stands: one file and one line."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forced import forced
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from problems import problems
from references import TOLERANCE, operands, reference, relative_error
from tensor_memory import TensorMemory
from torch.nn import functional

import mucudnn
from mucudnn import providers
from mucudnn.convolution.problem import Dim
from mucudnn.convolution.tile import tiles

TEXT = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()


def example(title: str) -> str:
    """The code of a block of that title."""
    (code,) = re.findall(rf'```python title="{title}"\n(.*?)```', TEXT, re.DOTALL)
    return str(code)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    """`HOST_PROVIDERS` with the line of the example, in the place of the one that is there."""
    path = tmp_path_factory.mktemp("example") / "taps.py"
    path.write_text(example("algorithm"))
    spec = importlib.util.spec_from_file_location("mucudnn.providers.taps", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names: dict[str, Any] = {**vars(providers), "Taps": module.Taps}
    exec(example("line"), names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(providers, "HOST_PROVIDERS", names["HOST_PROVIDERS"])
        providers.providers_on.cache_clear()
        yield names["HOST_PROVIDERS"]
    providers.providers_on.cache_clear()
    del sys.modules[spec.name]


@pytest.mark.usefixtures("collected_once")
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_its_results_are_right_within_its_workspace(table: tuple[Any, ...], data: st.DataObject) -> None:
    taps = table[-1]
    problem = data.draw(problems(dtypes=("float64", "float32", "bfloat16")))
    assume(taps.algorithms(problem))
    with_bias = problem.direction == "forward" and data.draw(st.booleans())
    given_operands = operands(problem, with_bias=with_bias)
    (tile,) = tiles(problem, Dim.BATCH, [problem.extent])
    with TensorMemory() as memory:
        taps.launch("taps", [tile.part(given_operands)], False)
    assert memory.peak <= taps.workspace(problem, "taps")
    error = relative_error(given_operands.target(problem), reference(problem, given_operands))
    assert error < TOLERANCE[problem.dtype]


def test_it_takes_part_in_plans(table: tuple[Any, ...]) -> None:
    x, w = torch.randn(4, 3, 9, 9, dtype=torch.float64), torch.randn(5, 3, 3, 3, dtype=torch.float64)
    expected = functional.conv2d(x, w, padding=1)
    for spatial in (False, True):
        with forced("taps", spatial):
            torch.testing.assert_close(functional.conv2d(x, w, padding=1), expected, rtol=1e-12, atol=1e-12)
            (record,) = mucudnn.report()
            assert {algorithm for _, algorithm in record.parts} == {"taps"}
