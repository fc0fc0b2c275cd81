"""Scripts that hold the edges of public ones print and leave on many ranks what they print and leave alone.

`make test` runs those of `QUICK`; `make test-scripts` runs all of them, in the environment of `make test-frameworks`.
All run one after another in one job for each partition, and in one process of plain python. A process that cannot
import distconv compares what they have printed and left.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TOGETHER, COMPARE = str(HERE / "together.py"), str(HERE / "without_distconv.py")
PARTITIONS = ["sample=2,height=2", "sample=2,channel=2"]
ENVIRONMENT = {
    **{
        name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "DISTCONV", "MUCUDNN"))
    },
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "DISTCONV_SLOW_AFTER": "never",
    "MPLBACKEND": "agg",
}
QUICK = {
    "small_batches": 1e-8,
    "own_optimizer": 1e-8,
    "lists_of_parameters": 1e-8,
    "digits_one_by_one": 1e-9,
    "best_weights": 1e-7,
    "detector": 2e-3,
    "graphs": 1e-8,
    "image_export": 1e-4,
    "inference": 1e-4,
    "masks": 1e-7,
    "pickled": 1e-4,
    "printed_losses": 1e-4,
}
"""By script: how far its numbers may be apart. Those printed with four digits, or computed in float32, allow 1e-4."""

OTHERS = {
    "confusion_masks": 1e-3,
    "gradient_penalty": 1e-6,
    "histograms": 1e-7,
    "hooks": 1e-8,
    "normalised": 1e-7,
    "pictures": 1e-7,
    "probes": 1e-4,
    "profiled": 1e-4,
    "random_layers": 1e-7,
    "restoration": 1e-4,
    "scores": 1e-6,
    "spectral_operator": 1e-3,
    "style": 1e-5,
    "traced": 1e-4,
    "whole_model_saved": 1e-4,
}
SCRIPTS = {**QUICK, **OTHERS} if "ALL_SCRIPTS" in os.environ else QUICK
if "ONLY_SCRIPTS" in os.environ:
    SCRIPTS = {name: {**QUICK, **OTHERS}[name] for name in os.environ["ONLY_SCRIPTS"].split()}


def run(folder: Path, *command: str) -> tuple[dict[str, str], str]:
    """What each script printed in a process of this folder, and what there was on stderr."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *command, TOGETHER, *SCRIPTS],
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    printed = dict(part.split("\n", 1) for part in f"\n{done.stdout}".split("\n== ")[1:])
    for name, text in printed.items():
        (folder / name / "printed.txt").write_text(text)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    return printed, done.stderr


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("partition", PARTITIONS)
def test_scripts_print_and_leave_what_they_do_alone(partition: str, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    printed, errors = run(alone)
    assert list(printed) == list(SCRIPTS) and not any("\nfailed: " in f"\n{text}" for text in printed.values()), errors
    _, told = run(tmp_path / partition, "-m", "distconv", "run", "--partition", partition)
    tolerances = [f"{name}={tolerance}" for name, tolerance in SCRIPTS.items()]
    command = [sys.executable, COMPARE, str(alone), str(tmp_path / partition), *tolerances]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert not done.stdout, f"{done.stdout}\n{told}"
