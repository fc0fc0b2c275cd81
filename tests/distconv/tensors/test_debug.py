"""What DISTCONV_DEBUG prints: messages and layouts of a model's call, on every rank."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from ranks import Ranks
from torch import nn

import distconv
from distconv import settings
from distconv.tensors.user_lines import program_lines


def printed(what: str) -> list[str]:
    """The lines of a call of two layers on 2 ranks with 2 rows each, without those of comparisons."""
    mesh = distconv.init("height=2", device_type="cpu")
    model = distconv.parallelize(nn.Sequential(nn.Conv2d(1, 1, 3, padding=1, bias=False), nn.ReLU()), mesh)
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), settings.options({"debug": what, "check": "off"}), torch.no_grad():
        model(torch.ones(1, 1, 4, 5))
    return [line.rpartition(", at ")[0] for line in stderr.getvalue().splitlines()]


@pytest.mark.gloo
def test_a_halo_is_one_line(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(printed, "messages")
    assert first == ["r0 all-to-all of 5 float32 -> r1: 20 B sent"]
    assert second == ["r1 all-to-all of 5 float32 -> r0: 20 B sent"]


def test_a_line_of_pythons_own_modules_is_never_named() -> None:
    """Such as that of a context manager whose end sends something, after the last line of the script."""
    found: list[str] = []

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        yield
        found.extend(line for line, _ in program_lines(sys._getframe()))

    with context():
        pass
    assert found and not any("contextlib.py" in line for line in found)


@pytest.mark.gloo
def test_each_function_is_one_line_with_its_layouts(ranks: Callable[[int], Ranks]) -> None:
    layout = "Spec(f32[1, 1, 4, 5](S(2)))"
    for rank, lines in enumerate(ranks(2).run(printed, "layouts")):
        functions = ("torch.nn.functional.conv2d", "torch.nn.functional.relu")
        assert lines == [f"r{rank} {function} of {layout} -> {layout}" for function in functions]
