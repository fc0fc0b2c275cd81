"""Imports run one way only: distconv -> mucudnn -> optimizer."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
OURS = ("optimizer", "mucudnn", "distconv", "benchmarks", "tests")
ALLOWED = {
    "optimizer": ("mucudnn.optimizer",),
    "mucudnn": ("mucudnn",),
    "distconv": ("distconv", "mucudnn"),
}
"""By folder: what its files may import of ours."""


def imported(path: Path) -> set[str]:
    """The modules that a file imports anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("folder", ALLOWED)
def test_packages_import_only_what_lies_beneath(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        ours = {name for name in imported(path) if name.partition(".")[0] in OURS}
        beneath = {name for name in ours if any(f"{name}.".startswith(f"{allowed}.") for allowed in ALLOWED[folder])}
        assert ours == beneath, path


def test_optimizer_needs_no_torch() -> None:
    """Imported beneath an empty package of that name, as the real one imports torch for reasons of its own."""
    program = (
        "import sys, types\n"
        "package = types.ModuleType('mucudnn')\n"
        f"package.__path__ = [{str(ROOT / 'mucudnn')!r}]\n"
        "sys.modules['mucudnn'] = package\n"
        "import mucudnn.optimizer\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
