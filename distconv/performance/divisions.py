"""Measures how mucudnn would divide a rank's convolutions on this machine, and how much workspace that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from distconv.performance.events import Kernel, KernelCall, Shape
from distconv.performance.kernels import threads_of_torch
from distconv.performance.machine import Machine
from mucudnn.convolution.problem import DTYPE_BYTES, ConvProblem, Direction
from mucudnn.optimizer import Division
from mucudnn.planning.planner import Planner
from mucudnn.settings import Settings
from mucudnn.timing.store import Store

aten = torch.ops.aten


class Divisions:
    """The desirable sets of convolutions, measured with as many threads as a rank has, and kept in mucudnn's database.

    Args:
        threads: that a rank of the job has.
        database: the path of mucudnn's database; that of its settings, if not given.
    """

    def __init__(self, threads: int, database: str | None = None) -> None:
        settings = Settings.from_environment(database=database)
        # What divisions need beyond torch's own kernel: that kernel's memory is needed in any case.
        settings = replace(settings, workspace_limit=math.inf, count_stock=False)
        self._planner = Planner(settings, Store(settings.database))
        self._threads = threads
        self._known: dict[Kernel, tuple[tuple[float, int], ...]] = {}

    def __call__(self, kernel: Kernel) -> Sequence[tuple[float, int]]:
        """(share of the kernel's own time, bytes of workspace), ascending in workspace; empty for no convolution."""
        if kernel.call is None:
            return ()
        key = replace(kernel, name=str(kernel.call))
        if key not in self._known:
            with threads_of_torch(self._threads):
                found = [self._planner.measurement(problem) for problem in problems(kernel.call)]
                plans = [self._planner.plan(each, math.inf) for each in found]
            self._known[key] = shares([plan.desirable() for plan in plans])
        return self._known[key]


def divided_here(machine: Machine) -> Machine:
    """The machine `here`, whose convolutions mucudnn may divide.

    Raises:
        ValueError: one line, for a machine on which nothing can be measured.
    """
    if machine.measured is None:
        raise ValueError(
            f"--workspaces: the file of {machine.name} has no times of divisions; accepted: --machine here"
        )
    return replace(machine, divided=Divisions(machine.threads or torch.get_num_threads()))


def problems(call: KernelCall) -> list[ConvProblem]:
    """The problems that a recorded call of `aten::convolution` or of its backward solves; none for any other call."""
    if call.operator is aten.convolution.default:
        x, w, _, *arguments = call.args
        directions = [Direction.FORWARD]
    elif call.operator is aten.convolution_backward.default:
        _, x, w, _, *arguments, wanted = call.args
        both = (Direction.BACKWARD_DATA, Direction.BACKWARD_FILTER)
        directions = [direction for direction, want in zip(both, wanted, strict=False) if want]
    else:
        return []
    stride, padding, dilation, transposed, output_padding, groups = arguments
    dtype = str(x.dtype).removeprefix("torch.")
    if dtype not in DTYPE_BYTES or 0 in x.sizes or not _contiguous(x) or not _contiguous(w):
        return []
    return [
        ConvProblem.of_convolution(
            direction,
            x.sizes,
            w.sizes,
            stride=tuple(stride),
            padding=tuple(padding),
            dilation=tuple(dilation),
            groups=groups,
            transposed=transposed,
            output_padding=tuple(output_padding),
            dtype=dtype,
        )
        for direction in directions
    ]


def _contiguous(tensor: Shape) -> bool:
    return torch.empty_strided(tensor.sizes, tensor.strides, device="meta").is_contiguous()


def shares(sets: Sequence[Sequence[Division]]) -> tuple[tuple[float, int], ...]:
    """What is left of the time of some problems that one call solves, within each workspace.

    Args:
        sets: the desirable set of each, torch's own kernel first.
    """
    if not sets:
        return ()
    own = sum(found[0].seconds for found in sets)
    least, left = 1.0, []
    for size in sorted({division.workspace for found in sets for division in found}):
        seconds = sum(min(one.seconds for one in found if one.workspace <= size or one is found[0]) for found in sets)
        if seconds / own < least:
            least = seconds / own
            left.append((least, size))
    return tuple(left)
