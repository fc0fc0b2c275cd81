"""Scripts of other frameworks, which know nothing of this project, print on many ranks what they print alone.

`make test-frameworks` runs this, in an environment of its own; `make test` leaves it out.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).with_name("scripts")
PARTITIONS = ["sample=2,height=2", "sample=2,channel=2"]
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "DISTCONV"))},
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
CASES = {
    "accumulated": ((), 1e-9),
    "classification": ((), 1e-7),
    "scaled": ((), 1e-4),
    "lbfgs": ((), 1e-4),
    "bfloat16": ((), 2e-3),  # a number has 8 bits: sums in another order, as of other threads, differ as much
    "lightning_fit": (("lightning",), 1e-4),
    "accelerate_train": (("accelerate",), 1e-4),
    "monai_segment": (("monai", "ignite"), 1e-4),
}
"""By script: the modules it needs, and how far its numbers may be apart, relatively."""

REFUSED = [
    ("detection", "sample=2,height=2", "a list of 4 tensors of 3 dims"),
    ("detection", "sample=2,channel=2", "a list of 4 tensors of 3 dims"),
]
"""Scripts that cannot run as they are, and what the one line says of it."""

Ran = tuple[int, str, str, Path]


def run(folder: Path, *command: str) -> Ran:
    """Exit code, what was printed, and the folder in which the script ran."""
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    return done.returncode, done.stdout, done.stderr, folder


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Ran]:
    """What plain python does with a script, run once."""
    ran: dict[str, Ran] = {}

    def run_alone(script: str) -> Ran:
        if script not in ran:
            ran[script] = run(tmp_path_factory.mktemp(script) / "alone", str(SCRIPTS / f"{script}.py"))
            assert ran[script][0] == 0, ran[script][2]
        return ran[script]

    return run_alone


def lines(printed: str) -> list[list[str | float]]:
    """Words and numbers of every line."""
    return [
        [float(word) if re.fullmatch(r"-?\d+\.\d+", word) else word for word in line.split()]
        for line in printed.splitlines()
    ]


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("script", CASES)
def test_numbers_and_files_are_those_of_one_process(
    script: str, partition: str, alone: Callable[[str], Ran], tmp_path: Path
) -> None:
    needed, tolerance = CASES[script]
    for name in needed:
        if importlib.util.find_spec(name) is None:
            pytest.fail(f"{name} is missing: run make test-frameworks")
    _, expected, _, left = alone(script)
    command = ("-m", "distconv", "run", "--partition", partition, str(SCRIPTS / f"{script}.py"))
    code, printed, errors, folder = run(tmp_path / "many", *command)
    assert code == 0, errors
    got, wanted = lines(printed), lines(expected)
    assert [len(line) for line in got] == [len(line) for line in wanted], printed
    for one, other in zip(got, wanted, strict=True):
        for word, number in zip(one, other, strict=True):
            if isinstance(number, float):
                assert word == pytest.approx(number, rel=tolerance, abs=tolerance), (one, other)
            else:
                assert word == number, (one, other)
    assert files(folder) == files(left)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("script", "partition", "reason"), REFUSED)
def test_what_cannot_run_is_one_line(script: str, partition: str, reason: str, tmp_path: Path) -> None:
    command = ("-m", "distconv", "run", "--partition", partition, str(SCRIPTS / f"{script}.py"))
    code, printed, errors, _ = run(tmp_path / "many", *command)
    assert (code, printed) == (2, ""), errors
    assert errors.startswith("distconv: ") and errors.count("\n") == 1 and reason in errors
