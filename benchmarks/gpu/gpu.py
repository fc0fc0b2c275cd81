"""What mucudnn gains on a GPU: layers within workspace limits, whole training steps, and what it costs.

    python benchmarks/gpu/gpu.py                                      # some minutes of it; run it again for the rest
    python benchmarks/gpu/gpu.py --part layers --group alexnet --precision float32 --limits 8,64
    python benchmarks/gpu/gpu.py --part layers --layers table.csv     # the layers of a table as deepbench_n256.csv
    python benchmarks/gpu/gpu.py --part iterations --network resnet50
    python benchmarks/gpu/gpu.py --tables                             # what is there so far; needs no GPU

Every layer is measured in three directions and four precisions: the best undivided plan and the best division within
each limit, beside torch with `benchmark=True`, without a cap and capped by cuDNN's own CUDNN_CONV_WSCAP_DBG. Training
steps run under mucudnn, torch, and torch capped.

The work is cut into units. A run ends before the unit that would take it beyond --seconds; what is measured is in
gpu.jsonl (figures), gpu.md (tables) and gpu-times.sqlite (times of launches, from which plans can be made anywhere,
with MUCUDNN_DATABASE) in the folder of results. The same command goes on from there until nothing is left.

With --device cpu the script tries itself: the host's algorithms, and small networks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import harness
from benchmarks.gpu import cases
from benchmarks.gpu.bench import Bench, DeviceLost, NoDevice, about, is_done, run
from benchmarks.gpu.layers import quiet_environment
from benchmarks.gpu.report import markdown, tables
from benchmarks.table import show
from mucudnn.convolution.problem import Direction

RESULTS = Path("benchmarks/results")
PARTS = ("layers", "iterations", "costs")
GROUPS = ("alexnet", "deepbench")
POLICIES = ("powerOfTwo", "all")


def mebibytes(text: str) -> list[int]:
    """ "0,8,64" in MiB, as bytes."""
    words = text.split(",")
    if not all(word.strip().isdecimal() for word in words):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are whole numbers of MiB with commas, as 0,8,64")
    return sorted({int(word) * cases.MIB for word in words})


def device_of(text: str) -> torch.device:
    try:
        device = torch.device(text)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cuda", "cpu"):
        raise argparse.ArgumentTypeError(f"{text!r}: accepted are cuda, cuda:0, cuda:1 and so on, and cpu")
    return torch.device("cuda", 0) if text == "cuda" else device


def arguments() -> argparse.Namespace:
    parser = harness.parser(__doc__)

    def some(flag: str, choices: tuple[str, ...], meaning: str, default: str = "every one") -> None:
        more = f"{meaning}; may be given again (default: {default})"
        parser.add_argument(flag, action="append", choices=choices, help=more)

    some("--part", PARTS, "what is measured")
    some("--group", GROUPS, "layers: whose")
    parser.add_argument("--layers", metavar="FILE", type=Path, help="layers: those of a CSV table, instead of --group")
    some("--precision", tuple(cases.PRECISIONS), "layers and iterations: how they compute")
    some("--direction", tuple(Direction), "layers: which pass")
    some("--policy", POLICIES, "layers: micro-batch sizes beside the undivided mini-batch")
    parser.add_argument(
        "--limits", type=mebibytes, default=list(cases.LIMITS), help="layers: in MiB (0,8,64,128,256,512)"
    )
    some("--network", (*cases.ITERATIONS, *cases.SMALL_ITERATIONS), "iterations: of which", "those of usual size")
    parser.add_argument("--iteration-limits", type=mebibytes, default=[64 * cases.MIB], help="iterations: in MiB (64)")
    parser.add_argument("--device", type=device_of, default="cuda:0", help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=420.0, help="of this run (default %(default)g)")
    parser.add_argument("--results", metavar="FOLDER", type=Path, default=RESULTS, help="(default %(default)s)")
    parser.add_argument("--retry", action="store_true", help="measure again what failed")
    parser.add_argument("--tables", action="store_true", help="print the tables of what is measured, and stop")
    return parser.parse_args()


def units(options: argparse.Namespace) -> list[cases.Unit]:
    """Everything that is asked for, in the order of measuring.

    Raises:
        cases.LayersError: for a table of layers that is not accepted.
    """
    parts = options.part or PARTS
    precisions = options.precision or list(cases.PRECISIONS)
    found: list[cases.Unit] = [cases.CostUnit()] if "costs" in parts else []
    if "iterations" in parts:
        found += [
            cases.IterationUnit(network, precision, limit)
            for precision in precisions
            for limit in options.iteration_limits
            for network in options.network or cases.ITERATIONS
        ]
    if "layers" in parts:
        if options.layers is not None:
            tables = {options.layers.stem: cases.read_layers(options.layers)}
        else:
            made = {"alexnet": cases.alexnet, "deepbench": lambda: cases.read_layers(cases.DEEPBENCH)}
            tables = {group: made[group]() for group in options.group or GROUPS}
        found += cases.layer_units(
            tables, precisions, options.direction or list(map(str, Direction)), options.policy or list(POLICIES)
        )
    return sorted(found, key=cases.turn)


def main() -> int:
    options = arguments()
    results = harness.Records(options.results / "gpu.jsonl", "key")
    if options.tables:
        show(tables(results.found))
        return 0
    try:
        wanted = units(options)
        where = about(options.device)
    except (cases.LayersError, NoDevice) as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    for row in results.found.values():
        if row["about"] != where:
            told = ", ".join(f"{name} {row['about'].get(name)} (now {where[name]})" for name in where)
            print(f"gpu.py: {options.results}: measured with {told}: name another --results", file=sys.stderr)
            return 2
    quiet_environment()
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
    bench = Bench(options.device, results, options.limits, options.results / "gpu-times.sqlite")
    pending = [unit for unit in wanted if not is_done(results, unit, options.limits, options.retry)]
    try:
        run(pending, len(wanted), results, where, options.seconds, bench.measure)
    except DeviceLost as error:
        print(f"gpu.py: the device cannot be used any more: {error}", file=sys.stderr)
        return 1
    finally:
        bench.close()
        (options.results / "gpu.md").write_text(markdown(results.found))
    show(tables(results.found))
    done = sum(is_done(results, unit, options.limits, False) for unit in wanted)
    rest = "" if done == len(wanted) else "; the same command goes on from here"
    print(f"gpu.py: {done} of {len(wanted)} units are measured, in {options.results}{rest}", file=sys.stderr)
    return 0 if done == len(wanted) else 3


if __name__ == "__main__":
    raise SystemExit(main())
