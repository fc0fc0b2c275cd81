"""Host time of a training step of ResNet-50 with tiny activations, in one process of a fake group of four ranks.

    python benchmarks/distributed/host.py    # the step, and the optimizer's part of it
    python benchmarks/distributed/host.py -c aot_eager -c inductor --save  # the step through torch.compile, too

Messages are free here: what is measured is the processor time of this process alone, medians of steps in turn. Beside
it stand the collectives of a step, and the bytes that a rank hands to them. Plain torch computes the whole batch; DDP
computes one image of four, measured before distconv changes anything in the process, beside plain torch at that time.
A first step through torch.compile is told in seconds of the processor, those of C++ compilers among them; over plain
stands how often those of the plain model, compiled likewise.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import distconv
from benchmarks.distributed.host_messages import Messages, let_messages_arrive_at_once
from benchmarks.harness import finish, parser
from benchmarks.networks import NETWORKS
from benchmarks.table import Table

RESULT = "host-cpu"
RANKS, WARM = 4, 3
PARTITIONS = ("sample=4", "height=4", "sample=2,height=2", "height=2,width=2", "sample=2,channel=2")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD with momentum": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, lr=1e-3, foreach=True),
}

Figures = dict[str, dict[str, Any]]
"""By arm: what was found of it."""


Step = Callable[[], None]


def step_of(model: nn.Module, x: Tensor, target: Tensor) -> Step:
    """Forward and backward; the gradients of the step before are dropped first."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        functional.cross_entropy(model(x), target).backward()

    return step


def timed(arms: Mapping[str, Step], rounds: int, baseline: str = "plain") -> Figures:
    """Milliseconds of each arm, in turn, and how often the baseline's."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(WARM + rounds):
        for name, step in arms.items():
            start = time.process_time()
            step()
            times[name].append(1e3 * (time.process_time() - start))
    medians = {name: statistics.median(values[WARM:]) for name, values in times.items()}
    return {name: {"ms": ms, "over plain": ms / medians[baseline]} for name, ms in medians.items()}


def counted(figures: Figures, arms: Mapping[str, Step]) -> Figures:
    """The same with what one more step of each arm sends."""
    for name, step in arms.items():
        with Messages() as messages:
            step()
        figures[name] |= {"collectives": messages.calls, "bytes": messages.bytes}
    return figures


def resnet(width: int) -> nn.Module:
    torch.manual_seed(0)
    return NETWORKS["resnet50"].build(width=width)


def _reduced(bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    dist.all_reduce(bucket.buffer())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def others(width: int, x: Tensor, target: Tensor, rounds: int) -> Figures:
    """Plain torch beside DistributedDataParallel."""
    own = x[:1].contiguous(), target[:1]
    ddp = nn.parallel.DistributedDataParallel(resnet(width))
    ddp.register_comm_hook(
        None, lambda _, bucket: _reduced(bucket)
    )  # its own waits for a result, which a fake group does not give
    arms = {
        "plain": step_of(resnet(width), x, target),
        "DDP": step_of(ddp, *own),
    }
    figures = counted(timed(arms, rounds), arms)
    figures.pop("plain")
    return figures


def ours(width: int, x: Tensor, target: Tensor, rounds: int) -> Figures:
    """Plain torch beside distconv."""
    arms = {"plain": step_of(resnet(width), x, target)}
    for partition in PARTITIONS:
        model = distconv.parallelize(resnet(width), distconv.init(partition, device_type="cpu"))
        arms[partition] = step_of(model, x, target)
    return counted(timed(arms, rounds), arms)


def compiled(width: int, x: Tensor, target: Tensor, rounds: int, backend: str, partitions: Iterable[str]) -> Figures:
    """Plain torch and distconv through torch.compile; what could not be compiled says why."""
    arms: dict[str, Step] = {}
    firsts: dict[str, float] = {}
    refused: Figures = {}
    for name in ("plain", *partitions):
        model = resnet(width)
        if name != "plain":
            model = distconv.parallelize(model, distconv.init(name, device_type="cpu"))
        step = step_of(torch.compile(model, backend=backend, fullgraph=True, dynamic=False), x, target)
        try:
            start = _with_compilers()
            step()
            arms[name], firsts[name] = step, _with_compilers() - start
        except Exception as error:  # whatever it refuses, it says
            refused[name] = {"refused": _line(error)}
    figures = timed(arms, rounds) if "plain" in arms else {}
    for name, found in figures.items():
        found |= {"first": firsts[name], "first over plain": firsts[name] / firsts["plain"]}
    return figures | refused


def _with_compilers() -> float:
    """Seconds of the processor so far of this process and of those, such as C++ compilers, that it has waited for."""
    return sum(os.times()[:4])


def compile_anew() -> None:
    """What a compiler has kept from another run is not used, and it works in this process alone."""
    import torch._inductor.config as inductor

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
    inductor.force_disable_caches = True
    inductor.compile_threads = 1


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:60]}" if str(error) else repr(error)


def optimizers(width: int, x: Tensor, target: Tensor, rounds: int) -> dict[str, Figures]:
    """The step of an optimizer alone, over plain parameters and over split ones."""
    found = {}
    for name, make in OPTIMIZERS.items():
        arms = {}
        for partition in ("plain", "sample=4", "sample=2,channel=2"):
            model = resnet(width)
            if partition != "plain":
                model = distconv.parallelize(model, distconv.init(partition, device_type="cpu"))
            optimizer = make(model.parameters())
            step_of(model, x, target)()
            arms[partition] = optimizer.step
        found[name] = timed(arms, rounds)  # type: ignore[arg-type]
    return found


def row(name: str, found: dict[str, Any], backends: Mapping[str, Figures]) -> tuple[str, ...]:
    if "refused" in found:
        return f"{name}: {found['refused']}", *["-"] * (4 + 2 * len(backends))
    sent = (f"{found['collectives']}", f"{found['bytes'] / 2**10:.0f}") if "bytes" in found else ("-", "-")
    cells = [cell for figures in backends.values() for cell in _cells(figures.get(name, {}))]
    return name, f"{found['ms']:.1f}", f"{found['over plain']:.2f}", *sent, *cells


def _cells(found: dict[str, Any]) -> tuple[str, str]:
    """Of one backend: the step, and the first one, which compiles."""
    if "ms" not in found:
        return found.get("refused", "-"), "-"
    return (
        f"{found['ms']:.1f} ({found['over plain']:.2f})",
        f"{found['first']:.1f} ({found['first over plain']:.2f})",
    )


def main() -> None:
    made = parser(__doc__, RESULT)
    made.add_argument("--width", type=int, default=4, help="channels of the first stage (default %(default)s)")
    made.add_argument("--size", type=int, default=64, help="height and width of the input (default %(default)s)")
    made.add_argument("--rounds", type=int, default=15, help="steps that count (default %(default)s)")
    backends_help = "of torch.compile, such as aot_eager or inductor; may be given several times"
    made.add_argument("--compile", "-c", metavar="BACKEND", action="append", default=[], help=backends_help)
    made.add_argument("--partitions", default=";".join(PARTITIONS), help="that are compiled, between semicolons")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    let_messages_arrive_at_once()
    x, target = torch.randn(RANKS, 3, arguments.size, arguments.size), torch.arange(RANKS)
    given = arguments.width, x, target, arguments.rounds
    beside = others(*given)
    steps = ours(*given) | beside
    backends: dict[str, Figures] = {}
    for backend in arguments.compile:
        compile_anew()
        backends[backend] = compiled(*given, backend, arguments.partitions.split(";"))
    updates = optimizers(*given)
    what = f"ResNet-50, width {arguments.width}"
    told = ("ms (over plain)", "its first step: s (over plain)")
    headings = ("", "ms of the host", "over plain", "collectives", "KiB")
    headings += tuple(f"{name}: {head}" if head is told[0] else head for name in backends for head in told)
    rows = [row(name, found, backends) for name, found in steps.items()]
    update_rows = [
        (name, *(f"{each['ms']:.1f} ({each['over plain']:.2f})" for each in found.values()))
        for name, found in updates.items()
    ]
    update = f"The step of an optimizer of {what}: milliseconds of the host, and over plain"
    tables = [
        Table(f"A training step of {what}, on 4 images of {arguments.size}²", headings, rows),
        Table(update, ("", *next(iter(updates.values()))), update_rows),
    ]
    finish(arguments, RESULT, "Host time of a training step", __doc__.split("\n\n")[2], tables)


if __name__ == "__main__":
    main()
