"""The examples of CONTRIBUTING.md, executed as they stand: a rule with its row of a table of tests, and a mesh axis."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from reference import errors
from torch import nn

import distconv
from distconv.settings.partition import AXES, Axis, Kind, Partition
from tests.distconv.rules.test_operators import SHAPES, compare

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()


def example(title: str) -> str:
    """The code of a block of that title."""
    (code,) = re.findall(rf'```python title="{title}"\n(.*?)```', TEXT, re.DOTALL)
    return str(code)


def row() -> tuple[str, Callable[..., Any]]:
    """The name and the operator of the row."""
    ((name, operator),) = eval("{" + example("row") + "}").items()
    return name, operator


def cumulative_sums(partition: str) -> dict[str, Any]:
    """What differs from one process."""
    name, operator = row()
    distconv.init(partition, device_type="cpu")
    SHAPES[name] = operator
    try:
        return compare([name], partition, (2, 3, 5, 4))
    finally:
        del SHAPES[name]


def test_a_rule_is_one_file_and_one_row(ranks: Callable[[int], Ranks]) -> None:
    assert (ROOT / "distconv" / "rules" / "reductions" / "cumulative.py").read_text() == example("rule")
    for wrong in ranks(3).run(cumulative_sums, "height=3"):
        assert not wrong


def own_operator(*rows: int) -> list[bool]:
    """Whether the operator of a program gives on these ranks what it gives on one, for inputs of so many rows."""
    mesh = distconv.init(f"height={dist.get_world_size()}", device_type="cpu")
    names: dict[str, Any] = {}
    exec(example("outside"), names)
    dilate, found = names["dilate"], []
    for each in rows:
        x = torch.randn(2, 3, each, 5, generator=torch.Generator().manual_seed(0))
        found.append(torch.equal(distconv.gather(dilate(distconv.shard(x, mesh), 2)), dilate(x, 2)))
    return found


@pytest.mark.gloo
def test_a_program_has_rules_of_its_own(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(3).run(own_operator, 9, 4) == [[True, True]] * 3  # of 4 rows one rank has none


def sound_along_its_length() -> dict[str, float]:
    """The errors of 1-D convolutions whose dim of space is sharded by the axis of the example."""
    axis = eval(example("axis"), {"Axis": Axis, "Kind": Kind})
    AXES[axis.name] = axis
    try:
        partition = f"{axis.name}={dist.get_world_size()}"
        build = lambda: nn.Sequential(nn.Conv1d(2, 3, 5, padding=2), nn.ReLU(), nn.Conv1d(3, 2, 3, stride=2))  # noqa: E731
        return errors(build, [(2, 2, 23)], partition)
    finally:
        del AXES[axis.name]


def test_a_mesh_axis_is_one_row(ranks: Callable[[int], Ranks]) -> None:
    with pytest.raises(ValueError, match=r"unknown axis 'length'; accepted: .* height, width"):
        Partition.parse("length=3")
    for found in ranks(3).run(sound_along_its_length):
        assert found and {what: error for what, error in found.items() if not error < 1e-12} == {}
