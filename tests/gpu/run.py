"""Runs the tests that need a GPU, file by file, and goes on where the last run ended.

    python tests/gpu/run.py                      # some minutes of it; run it again for the rest
    python tests/gpu/run.py --all                # every case, where a sample is the default
    python tests/gpu/run.py --device cpu         # tries the tests themselves on the host
    python tests/gpu/run.py test_results.py      # of these files only

Each file is a command of at most 8 minutes and ends in one plain line: what passed, failed and was skipped, and the
seconds. The lines are in gpu-tests.json in the folder of results, the whole output beside it. A file that has run to
its end is done, whatever came out; --again runs those that did not pass once more.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

FILE_SECONDS = 480.0
"""That one file may take."""

LEAST_SECONDS = 45.0
"""With less than this left no further file is begun."""

# The project's own options ask for plugins that need not be there.
PYTEST = (
    "-m",
    "pytest",
    "-o",
    "addopts=",
    "--import-mode=importlib",
    "-p",
    "no:cacheprovider",
    "-q",
    "-rf",
    "--tb=short",
)

NOTHING_TO_RUN = 5
"""Pytest's exit code where a whole file is skipped."""

Outcome = dict[str, Any]


def files() -> list[str]:
    """Those with tests, the quick and telling ones first."""
    first = ["test_arrays.py", "test_results.py", "test_patched.py", "test_memory.py", "test_distconv.py"]
    found = sorted(path.name for path in HERE.glob("test_*.py"))
    return [*(name for name in first if name in found), *(name for name in found if name not in first)]


def run(name: str, seconds: float, environment: dict[str, str], output: Path) -> Outcome:
    """Runs one file; its code is None where it did not come to its end."""
    output.parent.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with output.open("w") as written:
        process = subprocess.Popen(
            [sys.executable, *PYTEST, str(HERE / name)],
            cwd=ROOT,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = output.read_text(errors="replace").splitlines()
    took = time.perf_counter() - began
    summary = next(
        (line.strip("= ") for line in reversed(lines) if re.search(r"\d+ (passed|failed|skipped|error)", line)), ""
    )
    if code is None:
        summary = f"not finished within {seconds:.0f} s"
    elif not summary:
        summary = f"no summary, exit code {code}: {lines[-1] if lines else 'no output'}"
    if code == NOTHING_TO_RUN:
        code = 0
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {"code": code, "summary": summary, "failed": failed, "seconds": round(took, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", choices=[*files(), []], metavar="FILE", help="(default: every one)")
    parser.add_argument("--all", action="store_true", help="every case rather than a sample")
    parser.add_argument("--device", default="cuda:0", help="(default %(default)s)")
    parser.add_argument("--seconds", type=float, default=FILE_SECONDS, help="of this run (default %(default)g)")
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"), help="(default %(default)s)")
    parser.add_argument("--again", action="store_true", help="run what did not pass once more")
    options = parser.parse_args()
    state_file = options.results / "gpu-tests.json"
    kind = f"{options.device}{' all' if options.all else ''}"
    try:
        state: dict[str, dict[str, Outcome]] = json.loads(state_file.read_text())
    except (FileNotFoundError, ValueError):
        state = {}
    outcomes = state.setdefault(kind, {})
    environment = {**os.environ, "GPU_TESTS_DEVICE": options.device, "GPU_TESTS_ALL": "1" if options.all else ""}
    wanted = options.files or files()
    pending = [name for name in wanted if name not in outcomes or (options.again and outcomes[name]["code"])]
    began = time.perf_counter()
    while pending:
        left = options.seconds - (time.perf_counter() - began)
        if left < LEAST_SECONDS:
            break
        name = pending[0]
        output = options.results / "gpu-tests" / f"{Path(name).stem}-{kind.replace(':', '').replace(' ', '-')}.txt"
        outcome = run(name, min(left, FILE_SECONDS), environment, output)
        for line in outcome["failed"][:20]:
            print(f"  {line}")
        print(f"tests/gpu/{name}: {outcome['summary']} [{outcome['seconds']:.0f} s]", flush=True)
        if outcome["code"] is None and left < FILE_SECONDS:
            break  # it had less time than a file is promised: the next run begins with it
        outcomes[name] = {**outcome, "code": 124 if outcome["code"] is None else outcome["code"]}
        state_file.write_text(json.dumps(state, indent=1) + "\n")
        pending.pop(0)
    failed = [name for name in wanted if outcomes.get(name, {}).get("code")]
    told = f"; not passed: {', '.join(failed)}" if failed else ""
    rest = f"; left: {', '.join(pending)}" if pending else ""
    print(f"run.py: {len(wanted) - len(pending)} of {len(wanted)} files are run{told}{rest}", file=sys.stderr)
    return 3 if pending else 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
