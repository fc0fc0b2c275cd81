"""Every algorithm of one layer, in six types and formats and three directions, against float64.

Of each: the workspace, the time to make it ready, its time, its error on the whole, on two parts, and, for weight
gradients, when it adds to what is there (beta = 1). Also which of cuDNN's older Fourier and Winograd functions answer,
and whether the engines are those that cuDNN lists without a card.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping
from ctypes import c_void_p
from typing import Any

import torch

from benchmarks.gpu.cases import PRECISIONS, layer_problem
from benchmarks.gpu.fifteen import Run
from benchmarks.gpu.layers import through_torch
from benchmarks.layers.layer import Layer
from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem, Dim, Direction
from mucudnn.convolution.tile import tiles
from mucudnn.devices import device_of
from mucudnn.optimizer import Division, Option
from mucudnn.planning.planner import Planner
from mucudnn.providers import STOCK, Provider
from mucudnn.providers.cudnn.backend import AttributeName, Behavior, Descriptor, DescriptorKind, Type
from mucudnn.providers.cudnn.card import Card
from mucudnn.providers.cudnn.form import form
from mucudnn.providers.cudnn.graph import OperationGraph, PlannedCard
from mucudnn.providers.cudnn.legacy import Legacy
from mucudnn.providers.cudnn.library import CudnnError, Library
from mucudnn.settings import MEMORY, Settings
from mucudnn.timing.measurement import synthetic_operands
from mucudnn.timing.schedule import Schedule
from mucudnn.timing.store import Store

MIB = 2**20

MOST_SMALL = 8
"""About so many algorithms of each type, format and direction are tried where sizes are small."""

OLDER = ("fft", "fft_tiling", "winograd_nonfused")


def measure(run: Run) -> bool:
    for direction in Direction:
        for precision in PRECISIONS:
            if run.left <= 0:
                return False
            name = f"{precision} {direction}"
            if not run.figures.has(name):
                PRECISIONS[precision].apply()
                _measure(run, layer_problem(layer(run.small), precision, direction), name)
    if run.device.type == "cuda":
        run.attempt("older functions", _older, run)
        run.attempt("engines as listed without a card", _listed, run)
    return True


def layer(small: bool) -> Layer:
    """The second convolution of AlexNet."""
    given, weight = ((4, 8, 12, 12), (8, 8, 5, 5)) if small else ((64, 64, 27, 27), (192, 64, 5, 5))
    return Layer("conv2", given, weight, (1, 1), (2, 2), (1, 1), 1, False, (0, 0))


def algorithms(device: torch.device, problem: ConvProblem, most: int | None = None) -> dict[str, Provider]:
    """The provider of each algorithm that computes the problem, of about ``most``, without torch's own kernel."""
    settings = Settings.from_environment({}, database=MEMORY, policy="undivided", progress="off")
    providers = Planner(settings, Store(MEMORY), device=device).offers.providers(problem)
    some = list(providers.items())[:: max(1, len(providers) // (most or len(providers)))]
    return {name: who for name, who in some if name != STOCK and who.serves(problem, name)}


def _measure(run: Run, problem: ConvProblem, name: str) -> None:
    operands = synthetic_operands(problem, run.device)
    exact = _exact(problem, operands)
    rows = []
    call = through_torch(problem, operands)
    first = _seconds(call, run.device)
    rows.append({"algorithm": "torch", "first": first, "seconds": _usual(call, run.device)})
    result = call()
    if not isinstance(result, torch.Tensor):
        result = next(tensor for tensor in result if tensor is not None)
    rows[0]["error"] = _error(result, exact)
    for algorithm, provider in algorithms(run.device, problem, MOST_SMALL if run.small else None).items():
        if run.left <= 0:
            return  # another run begins with this one
        try:
            rows.append({"algorithm": algorithm, **_tried(run.device, problem, provider, algorithm, operands, exact)})
        except RuntimeError as error:
            rows.append({"algorithm": algorithm, "failed": (str(error) or repr(error)).splitlines()[0]})
    ran = [row for row in rows[1:] if "failed" not in row]
    best = min(ran, key=lambda row: row["seconds"], default=None)
    wrong = [
        row["algorithm"] for row in ran if not max(row["error"], row.get("in parts", 0), row.get("added", 0)) < 1e-2
    ]
    run.figures.add(
        name,
        f"{len(ran)} of {len(rows) - 1} run, fastest {best['algorithm'] if best else '-'}, torch's time over its "
        f"{rows[0]['seconds'] / best['seconds']:.2f}, largest error {max(row['error'] for row in ran):.1e}"
        f"{', wrong: ' + ' '.join(wrong) if wrong else ''}"
        if best
        else "none runs",
        rows=rows,
    )


def _exact(problem: ConvProblem, operands: Operands) -> torch.Tensor:
    """The result by torch in float64."""
    wide = Operands(*(tensor.double() for tensor in (operands.x, operands.w, operands.y)))
    found = through_torch(problem, wide)()
    return found if isinstance(found, torch.Tensor) else next(tensor for tensor in found if tensor is not None)


def _tried(
    device: torch.device,
    problem: ConvProblem,
    provider: Provider,
    algorithm: str,
    operands: Operands,
    exact: torch.Tensor,
) -> dict[str, object]:
    target = operands.target(problem)
    found: dict[str, object] = {"workspace": provider.workspace(problem, algorithm)}
    for parts, key in ((1, "error"), (2, "in parts")):
        if problem.extent % parts or not provider.serves(problem.with_extent(problem.extent // parts), algorithm):
            continue
        division = Division((Option(problem.extent // parts, algorithm, 0.0, 0),) * parts)
        schedule = Schedule(problem, division, {algorithm: provider})
        target.fill_(float("nan"))
        first = _seconds(lambda s=schedule: s.run(operands), device)
        found[key] = _error(target, exact)
        took = _usual(lambda s=schedule: s.run(operands), device)
        found |= {"first": first, "seconds": took} if parts == 1 else {"seconds in parts": took}
    if problem.direction is Direction.BACKWARD_FILTER and problem.extent % 2 == 0:
        before = torch.randn_like(exact) * exact.std()
        target.copy_(before)
        base = target.double()
        halves = [tile.part(operands) for tile in tiles(problem, Dim.BATCH, (problem.extent // 2,) * 2)]
        if all(provider.serves(half.problem, algorithm) for half in halves):
            provider.launch(algorithm, halves, accumulate=True)
            found["added"] = _error(target, base + exact)
    return found


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Relative, in the 2-norm."""
    return ((found.double() - exact).norm() / exact.norm()).item()


def _seconds(work: object, device: torch.device) -> float:
    began = time.perf_counter()
    work()  # type: ignore[operator]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _usual(work: object, device: torch.device) -> float:
    clock = device_of(device).clock
    return statistics.median(clock.seconds(work) for _ in range(3))  # type: ignore[arg-type]


def _older(run: Run) -> None:
    legacy = Legacy(Card(run.device.index or 0))
    for precision in ("float32", "tf32", "float16-nchw"):
        PRECISIONS[precision].apply()
        said = []
        for direction in Direction:
            problem = layer_problem(layer(run.small), precision, direction)
            for name in OLDER:
                try:
                    said.append(f"{direction} {name} {legacy.workspace(problem, f'legacy_{name}') / 2**20:.3g} MiB")
                except CudnnError as error:
                    said.append(f"{direction} {name} status {error.status}")
        run.figures.add(f"older functions, {precision}", "; ".join(said))


def _listed(run: Run) -> None:
    """Whether cuDNN lists the same engines, with the same workspaces, from the card's properties alone."""
    card = Card(run.device.index or 0)
    differences, counts = [], []
    with card.planning() as here:
        assert here.handle is not None
        properties = properties_of(card.library, here.handle)
        away = card_of(card.library, properties)
        for precision in ("float32", "float16-nchw", "float16"):
            for direction in Direction:
                description = form(layer_problem(layer(run.small), precision, direction))
                assert description is not None
                lists = [
                    dict(_workspaces(OperationGraph(card.library, where, description, accumulate=False)))
                    for where in (here, away)
                ]
                counts.append(len(lists[0]))
                if lists[0] != lists[1]:
                    other = sorted(i for i in {*lists[0], *lists[1]} if lists[0].get(i) != lists[1].get(i))
                    differences.append(f"{precision} {direction}: engines {other}")
    run.figures.add(
        "engines as listed without a card", "; ".join(differences) or f"equal, {counts} engines", properties=properties
    )


def _workspaces(graph: OperationGraph) -> Iterator[tuple[int, int]]:
    """The workspace of every engine that serves and is not compiled at run time, which takes seconds."""
    for index in range(graph.engines):
        try:
            engine = graph.engine(index)
            if Behavior.RUNTIME_COMPILATION not in engine.behavior:
                yield index, graph.plan(engine).workspace
        except CudnnError:
            continue


def card_of(library: Library, properties: Mapping[str, Any]) -> PlannedCard:
    """A card by its properties, cuDNN's own names for those of cudaDeviceProp."""
    descriptor = Descriptor(library, DescriptorKind.DEVICEPROP)
    descriptor.set_text(AttributeName.DEVICEPROP_JSON_REPRESENTATION, json.dumps(properties).encode())
    return PlannedCard(properties=descriptor.finalize())


def properties_of(library: Library, handle: c_void_p) -> dict[str, Any]:
    """The properties of a handle's card, as `card_of` takes them.

    Raises:
        CudnnError: where cuDNN does not tell them.
    """
    descriptor = Descriptor(library, DescriptorKind.DEVICEPROP).set(
        AttributeName.DEVICEPROP_HANDLE, Type.HANDLE, handle.value
    )
    found: dict[str, Any] = json.loads(descriptor.finalize().text(AttributeName.DEVICEPROP_JSON_REPRESENTATION))
    return found
