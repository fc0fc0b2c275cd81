"""Imports run one way only: distconv -> mucudnn -> optimizer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("optimizer", "mucudnn", "distconv", "benchmarks", "tests")
ALLOWED = {
    "optimizer": {"optimizer"},
    "mucudnn": {"mucudnn", "optimizer"},
    "distconv": {"distconv", "mucudnn", "optimizer"},
}


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_lies_beneath(package: str) -> None:
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert imported(path) & set(PACKAGES) <= ALLOWED[package], path


def test_optimizer_needs_no_torch() -> None:
    program = "import sys, optimizer; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
