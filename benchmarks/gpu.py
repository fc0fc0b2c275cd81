"""What mucudnn gains on a GPU: layers within workspace limits, whole training steps, and what it costs.

    python benchmarks/gpu.py                                      # some minutes of it; run it again for the rest
    python benchmarks/gpu.py --part layers --group alexnet --precision float32 --limits 8,64
    python benchmarks/gpu.py --part layers --layers table.csv     # the layers of a table as deepbench_n256.csv
    python benchmarks/gpu.py --part iterations --network resnet50
    python benchmarks/gpu.py --tables                             # what is there so far; needs no GPU

Every layer is measured in three directions and four precisions: the best undivided plan and the best division within
each limit, beside torch with `benchmark=True`, without a cap and capped by cuDNN's own CUDNN_CONV_WSCAP_DBG. Training
steps run under mucudnn, torch, and torch capped.

The work is cut into units. A run ends before the unit that would take it beyond --seconds; what is measured is in
gpu.json (figures), gpu.md (tables) and gpu-times.sqlite (times of launches, from which plans can be made anywhere, with
MUCUDNN_DATABASE) in the folder of results. The same command goes on from there until nothing is left.

With --device cpu the script tries itself: the host's algorithms, and small networks.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import gpu_costs, gpu_iterations, gpu_layers
from benchmarks.gpu_cases import (
    DEEPBENCH,
    ITERATIONS,
    LIMITS,
    MIB,
    PRECISIONS,
    CostUnit,
    IterationUnit,
    LayersError,
    LayerUnit,
    Unit,
    alexnet,
    layer_units,
    read_layers,
)
from benchmarks.gpu_report import markdown, summaries
from benchmarks.gpu_results import Results, ResultsError, Row
from benchmarks.gpu_timing import clock_of
from mucudnn.convolution.problem import Direction
from mucudnn.providers import providers_on
from mucudnn.version import VERSION

RESULTS = Path("benchmarks/results")
PARTS = ("layers", "iterations", "costs")
GROUPS = ("alexnet", "deepbench")
POLICIES = ("powerOfTwo", "all")
UNIT_SECONDS = 1.5
"""Seconds that the arms of a layer take turns; a network's take ten times as long."""


class NoDevice(RuntimeError):
    """There is nothing to measure on; the message is one line."""


class OutOfTime(Exception):
    """A unit takes longer than is left of the run. No RuntimeError, which would be taken for an algorithm's failure."""


class DeviceLost(RuntimeError):
    """An error after which this process cannot use the device any more; the message is one line."""


def mebibytes(text: str) -> list[int]:
    """ "0,8,64" in MiB, as bytes."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are whole numbers of MiB with commas, as 0,8,64")
    return sorted({int(word) * MIB for word in words})


def device_of(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are cuda, cuda:0, cuda:1 and so on, and cpu")
    return torch.device("cuda", 0) if text == "cuda" else device


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)

    def some(flag: str, choices: tuple[str, ...], meaning: str) -> None:
        parser.add_argument(
            flag, action="append", choices=choices, help=f"{meaning}; may be given again (default: every one)"
        )

    some("--part", PARTS, "what is measured")
    some("--group", GROUPS, "layers: whose")
    parser.add_argument("--layers", metavar="FILE", type=Path, help="layers: those of a CSV table, instead of --group")
    some("--precision", tuple(PRECISIONS), "layers and iterations: how they compute")
    some("--direction", tuple(Direction), "layers: which pass")
    some("--policy", POLICIES, "layers: micro-batch sizes beside the undivided mini-batch")
    parser.add_argument("--limits", type=mebibytes, default=list(LIMITS), help="layers: in MiB (0,8,64,128,256,512)")
    some("--network", ITERATIONS, "iterations: of which")
    parser.add_argument("--iteration-limits", type=mebibytes, default=[64 * MIB], help="iterations: in MiB (64)")
    parser.add_argument("--device", type=device_of, default="cuda:0", help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=420.0, help="of this run (default %(default)g)")
    parser.add_argument("--results", metavar="FOLDER", type=Path, default=RESULTS, help="(default %(default)s)")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--list", action="store_true", help="say what is measured and what is left, and stop")
    parser.add_argument("--tables", action="store_true", help="print the tables of what is measured, and stop")
    return parser.parse_args()


def units(options: argparse.Namespace) -> list[Unit]:
    """Everything that is asked for, in the order of measuring.

    Raises:
        LayersError: for a table of layers that is not accepted.
    """
    parts = options.part or PARTS
    precisions = options.precision or list(PRECISIONS)
    found: list[Unit] = [CostUnit()] if "costs" in parts else []
    if "iterations" in parts:
        found += [
            IterationUnit(network, precision, limit)
            for precision in precisions
            for limit in options.iteration_limits
            for network in options.network or ITERATIONS
        ]
    if "layers" in parts:
        if options.layers is not None:
            tables = {options.layers.stem: read_layers(options.layers)}
        else:
            made = {"alexnet": alexnet, "deepbench": lambda: read_layers(DEEPBENCH)}
            tables = {group: made[group]() for group in options.group or GROUPS}
        found += layer_units(
            tables, precisions, options.direction or list(map(str, Direction)), options.policy or list(POLICIES)
        )
    return found


def about(device: torch.device) -> dict[str, str]:
    """Where and with what is measured.

    Raises:
        NoDevice: where the device is not there, or not to be used.
    """
    versions = {"torch": torch.__version__, "cuDNN": str(torch.backends.cudnn.version()), "mucudnn": VERSION}
    if device.type == "cpu":
        return {"device": "cpu", **versions}
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        there = f"there are {count} CUDA devices" if torch.cuda.is_available() else "torch finds no CUDA device"
        raise NoDevice(f"{there}, {device} is to be measured on (--device cpu tries the script itself)")
    try:
        providers_on(device)
    except RuntimeError as error:
        raise NoDevice(str(error)) from error
    return {"device": torch.cuda.get_device_name(device), **versions}


class Bench:
    """Measures units on one device."""

    def __init__(self, device: torch.device, results: Results, limits: list[int]) -> None:
        self._device, self._results, self._limits = device, results, limits
        self._capped = gpu_layers.Capped(device)
        self._clock = clock_of(device)

    def measure(self, unit: Unit) -> Row:
        """The unit's row; one that says what failed, where it does.

        Raises:
            DeviceLost: where nothing more can be measured in this process.
        """
        try:
            return self._row(unit)
        except RuntimeError as error:  # out of memory among them
            reason = (str(error) or repr(error)).splitlines()[0]
        try:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLost(reason) from error
        return {"failed": reason}

    def _row(self, unit: Unit) -> Row:
        gpu_layers.free(self._device)
        database = self._results.database
        if isinstance(unit, LayerUnit):
            PRECISIONS[unit.precision].apply()
            limits = self._missing(unit)
            return gpu_layers.measure(unit, limits, self._device, self._clock, database, self._capped, UNIT_SECONDS)
        if isinstance(unit, IterationUnit):
            return gpu_iterations.measure(unit, self._device, database, 10 * UNIT_SECONDS)
        return gpu_costs.measure(self._device)

    def _missing(self, unit: LayerUnit) -> list[int]:
        there = self._results.rows.get(unit.key, {}).get("limits", {})
        return [limit for limit in self._limits if str(limit) not in there] or self._limits

    def close(self) -> None:
        self._capped.close()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """
    Raises:
        OutOfTime: in the middle of what is done when the time is over.
    """

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1.0))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def run(pending: list[Unit], done: int, results: Results, seconds: float, measure: Callable[[Unit], Row]) -> int:
    """Measures units one after the other until the next would end beyond `seconds`.

    One that turns out to take longer is left for another run, which finds the launches that this one has timed.

    Returns:
        How many were measured.

    Raises:
        DeviceLost: as `measure`; the unit counts as failed.
    """
    began, longest, count = time.perf_counter(), 0.0, 0
    with tqdm(total=done + len(pending), initial=done, desc="units", file=sys.stderr, disable=None) as bar:
        for unit in pending:
            start = time.perf_counter()
            left = seconds - (start - began)
            if count and longest > left:
                break
            bar.set_postfix_str(unit.key)
            try:
                with at_most(left):
                    row = measure(unit)
            except OutOfTime:
                break
            except DeviceLost as error:
                results.add(unit.key, {"failed": str(error)})
                raise
            results.add(unit.key, row)
            longest = max(longest, time.perf_counter() - start)
            count += 1
            bar.update()
    return count


def show(results: Results) -> None:
    console = Console(width=None if sys.stdout.isatty() else 180)
    for table in summaries(results):
        console.print(table.rich())


def main() -> int:
    options = arguments()
    try:
        wanted = units(options)
        results = Results.load(options.results)
        if options.tables:
            show(results)
            return 0
        pending = [unit for unit in wanted if not results.is_done(unit.key, options.limits, options.retry)]
        done = len(wanted) - len(pending)
        if options.list:
            left = {unit.key for unit in pending}
            for unit in wanted:
                print(f"{'left' if unit.key in left else 'done'}  {unit.key}")
            return 0
        results.continue_on(about(options.device))
    except (LayersError, ResultsError, NoDevice) as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    gpu_layers.quiet_environment()
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
    bench = Bench(options.device, results, options.limits)
    try:
        done += run(pending, done, results, options.seconds, bench.measure)
    except DeviceLost as error:
        print(f"gpu.py: the device cannot be used any more: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        done = sum(results.is_done(unit.key, options.limits, False) for unit in wanted)
    finally:
        bench.close()
        if results.rows:
            results.write("gpu.md", markdown(results))
    show(results)
    rest = "" if done == len(wanted) else "; the same command goes on from here"
    print(f"gpu.py: {done} of {len(wanted)} units are measured, in {results.folder}{rest}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
