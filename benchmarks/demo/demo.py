"""Runs the brain scripts as they are and beneath mucudnn and distconv, and shows what each arm costs and gains.

    python benchmarks/demo/demo.py                  # both parts; pictures and records go to demo/
    python benchmarks/demo/demo.py --only slices    # mucudnn: 31x31 kernels within 8 MiB of workspace
    python benchmarks/demo/demo.py --only volume    # distconv above mucudnn: a 3-D U-Net on four ranks
    python benchmarks/demo/demo.py --save           # keeps the figures in benchmarks/results/demo-cpu.*

Each part has three arms: torch as it is; the fastest undivided algorithms within the workspace limit
(MUCUDNN_BATCH_SIZE_POLICY=undivided); and mucudnn's divisions within the same limit (powerOfTwo). The limits are such
that the fast algorithms do not fit undivided. What was divided is read from the reports that the runs write.

Each part also trains a few steps in float64, where rounding leaves next to nothing: these losses must agree to 1e-9,
or the exit code is 1. In float32, training amplifies rounding from step to step: that difference is shown.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.demo.arms import Arm, Run, file_name, losses_differ, tables
from benchmarks.harness import ROOT, finish, parser
from mucudnn.sizes import format_bytes, parse_bytes

TOLERANCE = 1e-9
"""Relative difference of losses that the rounding of float64 explains."""

RESULT = "demo-cpu"

SLICES = "benchmarks/demo/brain_slices.py", "--batch", "20", "--width", "8", "--steps", "24"
SLICES_LIMIT = "8MiB"
"""Undivided, the Fourier transform of a 31x31 convolution needs 11.9 to 13.6 MiB here; torch's kernel is far slower."""

VOLUME = "benchmarks/demo/brain_volume.py", "--steps", "20", "--size", "40x48x40"
VOLUME_LIMIT = "1MiB"
PARTITION = "depth=2,height=2"
RANKS = 4

AHEAD = "--planning", "ahead"
"""Every arm is to show settled speeds after few steps."""

EXACT = ("--dtype", "float64", "--steps", "4")
"""Arguments of the runs whose losses must agree. They may use twice the workspace, as each number takes twice."""


def _doubled(limit: str) -> str:
    return f"{2 * int(parse_bytes(limit))}"


def _mucudnn(folder: Path, name: str, limit: str, policy: str) -> Arm:
    report = folder / f"{file_name(name)}-plans.json"
    options = ["--workspace-limit", limit, "--policy", policy, "--database", str(folder / "times.sqlite"), *AHEAD]
    return Arm(name, ["-m", "mucudnn", "run", *options, "--report", str(report)], report=report)


def slices(folder: Path) -> list[Run]:
    """Large kernels on slices: plain, undivided and divided within the limit; then plain and divided in float64."""
    picture = "--picture", str(folder / "slices.png")
    return [
        Arm("plain").run(folder, *SLICES),
        _mucudnn(folder, "undivided", SLICES_LIMIT, "undivided").run(folder, *SLICES),
        _mucudnn(folder, "divided", SLICES_LIMIT, "powerOfTwo").run(folder, *SLICES, *picture),
        Arm("plain, float64").run(folder, *SLICES, *EXACT),
        _mucudnn(folder, "divided, float64", _doubled(SLICES_LIMIT), "powerOfTwo").run(folder, *SLICES, *EXACT),
    ]


def _four_ranks(folder: Path, name: str, limit: str, policy: str) -> Arm:
    report = folder / f"{file_name(name)}-plans.json"
    command = ["-m", "distconv", "run", "--partition", PARTITION, "--print-all-ranks", "--report", str(report)]
    environment = {
        "MUCUDNN_WORKSPACE_LIMIT": limit,
        "MUCUDNN_BATCH_SIZE_POLICY": policy,
        "MUCUDNN_DATABASE": str(folder / "times.sqlite"),
        "MUCUDNN_PLANNING": "ahead",
    }
    return Arm(name, command, {**ONE_THREAD, **environment}, report, ranks=RANKS)


ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def volume(folder: Path) -> list[Run]:
    """A 3-D U-Net in one process, and on four ranks undivided and divided within the limit; then in float64."""
    weights = str(folder / "weights.pt")
    one = Arm("one process", environment=ONE_THREAD)
    runs = [
        one.run(folder, *VOLUME),
        _four_ranks(folder, "four ranks, undivided", VOLUME_LIMIT, "undivided").run(folder, *VOLUME),
        _four_ranks(folder, "four ranks, divided", VOLUME_LIMIT, "powerOfTwo").run(folder, *VOLUME, "--save", weights),
        Arm("one process, float64", environment=ONE_THREAD).run(folder, *VOLUME, *EXACT),
        _four_ranks(folder, "four ranks, divided, float64", _doubled(VOLUME_LIMIT), "powerOfTwo").run(
            folder, *VOLUME, *EXACT
        ),
    ]
    picture = "--load", weights, "--steps", "0", "--picture", str(folder / "volume.png")
    Arm("picture").run(folder, *VOLUME, *picture)
    return runs


PARTS = {"slices": slices, "volume": volume}
TITLES = {
    "slices": f"31x31 kernels on axial slices, {format_bytes(parse_bytes(SLICES_LIMIT))} of workspace",
    "volume": f"3-D U-Net on the whole volume, {PARTITION}, {format_bytes(parse_bytes(VOLUME_LIMIT))} of workspace",
}


def main() -> int:
    made = parser(__doc__, RESULT)
    made.add_argument("--only", choices=[*PARTS], action="append", help="a part; may be repeated")
    made.add_argument("--folder", type=Path, default=ROOT / "demo", help="where files go (default: demo/)")
    options = made.parse_args()
    parts = list(dict.fromkeys(options.only or PARTS))
    if options.save and len(parts) < len(PARTS):
        made.error("--save keeps both parts: leave --only out")
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    runs = {part: PARTS[part](folder) for part in parts}
    shown = [table for part in parts for table in tables(TITLES[part], runs[part])]
    finish(options, RESULT, "The demo, on a CPU", "`python benchmarks/demo/demo.py --save`:", shown)
    print(f"pictures and records: {options.folder}")
    return _verdict(runs)


def _verdict(runs: dict[str, list[Run]]) -> int:
    """0, or 1 with a line on stderr that says what the demo was to show and did not."""
    failures = []
    for part, (*_, divided, plain64, divided64) in runs.items():
        if losses_differ(plain64, divided64) > TOLERANCE:
            failures.append(f"{part}: losses in float64 differ by more than {TOLERANCE}")
        if not divided.cut:
            failures.append(f"{part}: no convolution was divided")
    for failure in failures:
        print(f"demo: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
