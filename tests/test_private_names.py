"""Every private name of torch that the source uses stands in a table, and the tables hold no other."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
import torch

import distconv.__main__
import distconv.private_names
import mucudnn.__main__
import mucudnn.private_names
from mucudnn.private_names import MissingName, Name, demand, is_there

ROOT = Path(__file__).resolve().parent.parent
TABLES = {"mucudnn": mucudnn.private_names.NAMES, "distconv": distconv.private_names.NAMES}
OTHERS = {
    *("_at_fork_reinit", "_current_frames", "_exit", "_getframe", "_inst", "_mmap", "_run_exitfuncs", "_shutdown"),
    *("_urandom", "_use_fd_functions", "_distconv_copy", "_distconv_history"),
}
"""Private attributes of objects of Python and NumPy, and those that we give to objects of torch."""
SOME = "torch._C._select_conv_backend"

parsed = functools.cache(ast.parse)


def is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def own_names(trees: Iterable[ast.Module]) -> set[str]:
    """Attributes that our classes define."""
    found = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                if isinstance(line, ast.FunctionDef):
                    found.add(line.name)
                elif isinstance(line, ast.Assign | ast.AnnAssign):
                    targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                    found |= {target.id for target in targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


class Uses(ast.NodeVisitor):
    """What a file uses.

    Attributes:
        found: paths of private names of torch, and `?.name` for private attributes of objects whose class is not told.
        words: every attribute and string.
    """

    def __init__(self, tree: ast.Module, own: set[str]) -> None:
        self.found: set[str] = set()
        self.words: set[str] = set()
        self._own = own
        self._torch: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    if name.name.partition(".")[0] == "torch":
                        self._meet(name.asname or "torch", name.name if name.asname else "torch", name.name)
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "torch":
                for name in node.names:
                    path = f"{node.module}.{name.name}"
                    self._meet(name.asname or name.name, path, path)
        self.visit(tree)

    def _meet(self, here: str, stands_for: str, path: str) -> None:
        self._torch[here] = stands_for
        if is_private(path):
            self.found.add(path)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts, begin = [], node
        while isinstance(begin, ast.Attribute):
            parts.insert(0, begin.attr)
            begin = begin.value  # type: ignore[assignment]
        self.words.update(parts)
        if isinstance(begin, ast.Name) and begin.id in self._torch:
            path = ".".join((self._torch[begin.id], *parts))
            if is_private(path) and not path.startswith("torch.ops."):
                self.found.add(path)
        else:
            self.found |= {f"?.{part}" for part in parts if is_private(part) and part not in self._own | OTHERS}
            self.visit(begin)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id == "substituted":  # whose keywords are attributes
            for name in (keyword.arg for keyword in node.keywords if keyword.arg):
                self.visit(ast.Attribute(node.args[0], name, ast.Load()))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.words.add(node.value)


def stands_for(row: str, use: str) -> bool:
    """Whether a row lists a use: by itself, by what it is a public attribute of, or by what lies within it."""
    if use.startswith("?."):
        return use.removeprefix("?.") in row.split(".")
    return row.startswith(f"{use}.") or (f"{use}.".startswith(f"{row}.") and not is_private(use[len(row) + 1 :]))


def unlisted_and_unused(
    sources: Sequence[str], own_sources: Sequence[str], names: Sequence[Name]
) -> tuple[list[str], list[str]]:
    """The uses without a row, and the rows without a use."""
    own = own_names(map(parsed, own_sources))
    files = [Uses(parsed(source), own) for source in sources]
    found = set().union(*(file.found for file in files))
    words = set().union(*(file.words for file in files))
    rows = [name.path for name in names]
    unlisted = [use for use in found if not any(stands_for(row, use) for row in rows)]
    unused = [row for row in rows if row not in found and row.rpartition(".")[2] not in words]
    return sorted(unlisted), sorted(unused)


def sources(*packages: str) -> list[str]:
    files = [file for package in packages for file in (ROOT / package).rglob("*.py") if file.name != "private_names.py"]
    return [file.read_text() for file in files]


@pytest.mark.parametrize("package", TABLES)
def test_the_table_holds_what_the_source_uses(package: str) -> None:
    assert unlisted_and_unused(sources(package), sources(*TABLES), TABLES[package]) == ([], [])
    paths = [name.path for name in TABLES[package]]
    assert len(paths) == len(set(paths)) and all(name.why for name in TABLES[package])


@pytest.mark.parametrize(
    ("line", "use"),
    [
        ("from torch._x import y", "torch._x.y"),
        ("import torch._x.y as z", "torch._x.y"),
        ("import torch\ntorch.nn._x(1).z", "torch.nn._x"),
        ("from torch import nn as n\nn.Module._x.y = 1", "torch.nn.Module._x.y"),
        ("def f(x): return x.weight._x", "?._x"),
        ("def f(x): return g(x)._x", "?._x"),
    ],
)
def test_a_use_without_a_row_is_found(line: str, use: str) -> None:
    assert unlisted_and_unused([line], [], ())[0] == [use]


def test_what_is_no_private_name_of_torch_is_not_found() -> None:
    ours = (
        "import torch, os\nclass A:\n  _a: int\n  def _b(self): self._c = torch.nn.Conv2d\ndef f(x): x._a, x._b(), x._c"
    )
    assert unlisted_and_unused([ours, "import os, torch; os._exit(1); x.__dict__; torch.ops.aten._x"], [ours], ()) == (
        [],
        [],
    )


def test_a_row_without_a_use_is_found() -> None:
    names = Name("torch._x", "used"), Name("torch._y", "not used"), Name("torch.nn.Module._z", "of some object")
    assert unlisted_and_unused(["import torch\ntorch._x\nx._z"], [], names) == ([], ["torch._y"])


@pytest.mark.parametrize(
    ("path", "known"),
    [
        (SOME, True),
        ("torch._C._no", False),
        ("torch.nn.Module._parameters", True),  # annotated
        ("torch._ops.OpOverload._schema", True),  # given by __init__
        ("torch.nn.Module.state_dict._metadata", True),  # given by a function to what it returns
        ("torch.nn.Module._no", False),
        ("torch.nn.Module._no.more", False),
        ("torch._inductor.scheduler.SchedulerNode", True),  # not imported: read
        ("torch._inductor.scheduler.SchedulerNo", False),
        ("torch._inductor.nowhere_at_all", False),
        ("torch._no.more", False),
    ],
)
def test_names_are_found_without_imports(path: str, known: bool) -> None:
    before = set(sys.modules)
    assert is_there(path) == known
    assert set(sys.modules) == before


def test_a_release_is_asked_for_what_it_should_have(monkeypatch: pytest.MonkeyPatch) -> None:
    later = Name("torch._no", "of a later release", since="99.0")
    demand("a package", [Name(SOME, "there"), later])
    with pytest.raises(MissingName) as told:
        demand("a package", [Name("torch._C._no", "not there"), Name("torch._C._nor", "not there"), later])
    assert str(told.value) == (
        f"a package needs torch._C._no, torch._C._nor, which torch {torch.__version__} does not have; "
        "tested are torch 2.11 to 2.14.1"
    )
    cuda = [Name("torch._C._no", "not there", cuda=True)]
    monkeypatch.setattr(torch.version, "cuda", None)
    demand("a package", cuda)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(MissingName):
        demand("a package", cuda)


COMMANDS = {
    "mucudnn": ["-m", "mucudnn", "doctor"],
    "of mucudnn": ["-m", "distconv", "doctor"],
    "distconv": ["-m", "distconv", "run", "--partition", "sample=2", "train.py"],
    "chosen": ["-m", "distconv", "run", "--partition", "auto", "--nproc", "2", "train.py"],
}


@pytest.mark.parametrize("case", COMMANDS)
def test_a_command_says_in_one_line_what_torch_lacks(case: str, tmp_path: Path) -> None:
    """Python imports a sitecustomize when it starts: this one adds a row to a table."""
    package = "mucudnn" if "mucudnn" in case else "distconv"
    (tmp_path / "sitecustomize.py").write_text(
        f"import {package}.private_names as table\n"
        "table.NAMES = (*table.NAMES, table.Name('torch._C._no', 'not there'))\n"
    )
    (tmp_path / "train.py").write_text("raise AssertionError('the script has begun')")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *COMMANDS[case]], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"{package} needs torch._C._no, which torch {torch.__version__} does not have; tested are" in line


@pytest.mark.parametrize("package", TABLES)
def test_an_import_after_torch_s_asks_at_once(package: str) -> None:
    program = f"import torch; del {SOME}; import {package}"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=240)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"mucudnn.private_names.MissingName: mucudnn needs {SOME}, which")


def test_the_tested_releases_are_the_same_everywhere() -> None:
    oldest, newest = mucudnn.private_names.TESTED
    assert f'"torch>={oldest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"NEWEST := {newest}\n" in (ROOT / "Makefile").read_text()
    page = (ROOT / "docs/index.md").read_text()
    assert f"\n| {newest} " in page and f"\n| {oldest}." in page
