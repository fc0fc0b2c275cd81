"""What mucudnn itself takes of the host's time: the detour of a call left to torch, and every part of a plan."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch.nn import functional

from benchmarks.layers.overhead import detour
from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.convolution.tile import tile
from mucudnn.optimizer import Division, Option
from mucudnn.planning.planner import Planner
from mucudnn.providers import STOCK
from mucudnn.settings import MEMORY, Settings
from mucudnn.timing.measurement import synthetic_operands
from mucudnn.timing.schedule import Schedule
from mucudnn.timing.store import Store

FEW, MANY = 2, 66
ROUNDS = 51


def measure(device: torch.device) -> dict[str, Any]:
    """A row of results, in microseconds."""
    image, kernel = torch.randn(1, 1, 4, 4, device=device), torch.randn(1, 1, 1, 1, device=device)

    def forward() -> None:
        with torch.no_grad():
            functional.conv2d(image, kernel)

    stock, shim = detour(forward)
    algorithm, part = part_microseconds(device)
    return {"unit": {}, "stock": stock, "shim": shim, "algorithm": algorithm, "part": part}


def part_microseconds(device: torch.device) -> tuple[str, float]:
    """The algorithm with the least workspace, and what a part of one small sample takes to be called."""
    geometry = {"stride": (1, 1), "padding": (1, 1), "dilation": (1, 1)}
    problem = ConvProblem.of_convolution(Direction.FORWARD, (MANY, 16, 8, 8), (16, 16, 3, 3), **geometry)
    operands = synthetic_operands(problem, device)
    planner = Planner(Settings.from_environment({}, database=MEMORY), Store(MEMORY), device=device)
    one = problem.with_extent(1)
    providers = {name: who for name, who in planner.offers.providers(problem).items() if who.serves(one, name)}
    workspace, algorithm = min((providers[name].workspace(one, name), name) for name in providers if name != STOCK)

    def microseconds(parts: int) -> float:
        division = Division((Option(1, algorithm, 0.0, workspace),) * parts)
        cut = tile(problem, Dim.BATCH, 0, parts)
        given = cut.part(operands)
        schedule = Schedule(cut.problem, division, providers)
        times = []
        for _ in range(ROUNDS):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            began = time.perf_counter()
            schedule.run(given)
            times.append(time.perf_counter() - began)
        return 1e6 * statistics.median(times)

    return algorithm, (microseconds(MANY) - microseconds(FEW)) / (MANY - FEW)
