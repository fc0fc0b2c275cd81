"""Everything that a GPU is needed for, in order: the first contact, the tests, the figures.

    python benchmarks/gpu/everything.py                     # `make gpu`: 8 minutes of it; run it again for the rest
    python benchmarks/gpu/everything.py --device cpu        # tries the scripts
    python benchmarks/gpu/everything.py --small --results tried    # tries them in minutes: small sizes, a file of tests

Each of the three keeps what it has in the folder of results and begins where it ended; this one hands out the time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

STAGES = {
    "first contact": ("benchmarks/gpu/first_contact.py", 290.0),
    "tests": ("tests/gpu/run.py", 480.0),
    "figures": ("benchmarks/gpu/gpu.py", 480.0),
}
"""The script of each, and the most seconds that it gets of one run."""

SMALL = {
    "first contact": [],
    "tests": ["test_any.py"],
    "figures": [
        *("--layers", str(ROOT / "benchmarks/gpu/small.csv"), "--precision", "float32", "--policy", "powerOfTwo"),
        *("--limits", "0,8", "--iteration-limits", "8", "--network", "alexnet-small", "--network", "unet3d-small"),
    ],
}
"""What each is asked for to be tried; their results are no figures of a card, and belong into a folder of their own."""

LEAST_SECONDS = 60.0
"""With less than this left no further stage is begun."""

NO_DEVICE, LEFT = 2, 3
"""Exit codes of the scripts: there is nothing to run on; something is left for another run."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0, help="of this run (default %(default)g)")
    parser.add_argument("--device", default="cuda:0", help="(default %(default)s)")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="(default %(default)s)")
    parser.add_argument("--small", action="store_true", help="only try the scripts, with small sizes")
    options = parser.parse_args()
    began = time.perf_counter()
    left, failed = [], []
    for name, (script, most) in STAGES.items():
        seconds = min(most, options.seconds - (time.perf_counter() - began))
        if seconds < LEAST_SECONDS:
            left.append(name)
            continue
        shared = ["--seconds", f"{seconds:.0f}", "--device", options.device, "--results", str(options.results)]
        shared += SMALL[name] if options.small else []
        print(f"everything.py: {name}, {seconds:.0f} s at most", file=sys.stderr, flush=True)
        code = subprocess.run([sys.executable, str(ROOT / script), *shared], check=False).returncode
        if code == NO_DEVICE:
            return NO_DEVICE
        if code == LEFT:
            left.append(name)
        elif code:
            failed.append(name)
    told = f"; failed: {', '.join(failed)}" if failed else ""
    rest = f"left: {', '.join(left)}; the same command goes on from here" if left else "everything is done"
    print(f"everything.py: {rest}{told}", file=sys.stderr)
    return LEFT if left else 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
