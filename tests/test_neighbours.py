"""A script and its own modules run as under plain python, whatever their names are and wherever it is started from."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from distconv.job.launcher import mpiexec

ROOT = Path(__file__).resolve().parent.parent
FOLDER = Path(__file__).with_name("neighbours")
SCRIPT = str(FOLDER / "train.py")
ENVIRONMENT = {
    **{
        name: value for name, value in os.environ.items() if not name.startswith(("PMI", "OMPI", "DISTCONV", "MUCUDNN"))
    },
    "PYTHONPATH": str(ROOT),
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MUCUDNN_DATABASE": ":memory:",
}
MODULE = [sys.executable, "-m"]
DISTCONV = ["-m", "distconv", "run", "--partition", "height=2"]


def output(cwd: Path, *command: str) -> str:
    done = subprocess.run(
        command,
        cwd=cwd,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def plain() -> str:
    return output(FOLDER, sys.executable, SCRIPT)


@pytest.mark.parametrize(
    ("launcher", "place"),
    [
        ("mucudnn", "its own folder"),
        ("mucudnn", "another folder"),
        ("distconv", "its own folder"),
        ("distconv", "another folder"),
        ("mpiexec", "its own folder"),
        ("torchrun", "another folder"),
    ],
)
def test_the_script_finds_its_own_modules(launcher: str, place: str, plain: str, tmp_path: Path) -> None:
    """The script prints sys.path, whose modules it imported, and its losses."""
    if launcher == "mpiexec":
        pytest.importorskip("mpi4py")
        try:
            start = mpiexec(2)
        except FileNotFoundError as error:
            pytest.skip(str(error))
    command = {
        "mucudnn": lambda: [*MODULE, "mucudnn", "run"],
        "distconv": lambda: [sys.executable, *DISTCONV],
        "mpiexec": lambda: [*start, sys.executable, *DISTCONV],
        "torchrun": lambda: [*MODULE, "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *DISTCONV],
    }[launcher]()
    assert output(FOLDER if place == "its own folder" else tmp_path, *command, SCRIPT) == plain


def test_no_module_of_that_name_with_a_checkout_on_the_path(tmp_path: Path) -> None:
    """Running from a checkout without installing leaves the name `optimizer` free as well."""
    done = subprocess.run(
        [sys.executable, "-c", "import optimizer"], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'optimizer'"
