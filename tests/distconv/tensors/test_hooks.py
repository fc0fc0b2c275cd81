"""The table of hooks says who adds to each and who calls it."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from distconv.tensors import hooks

PACKAGE = Path(hooks.__file__).resolve().parents[1]
ADDS = re.compile(r"\bhooks\.(\w+)(\.append\(|\.insert\(|\[\w+\] = )")
NAMED = re.compile(r"\bhooks\.(\w+)")


def of_table(cell: str) -> set[str]:
    return set(re.findall(r"`([\w.]+)`", cell))


def test_the_table_is_that_of_the_code() -> None:
    adding, calling = defaultdict(set), defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        text = path.read_text()
        for name, _ in ADDS.findall(text):
            adding[name].add(module)
        for name in NAMED.findall(text):
            calling[name].add(module)
    rows = [line.split("|")[1:4] for line in (hooks.__doc__ or "").splitlines() if line.startswith("| `")]
    assert len(rows) == len({name for name in {*adding, *calling} if hasattr(hooks, name)})
    for hook, adds, calls in rows:
        (name,) = of_table(hook)
        assert of_table(adds) == adding[name], name
        assert of_table(calls) == calling[name] - adding[name], name


def test_no_other_module_keeps_functions_for_lower_ones() -> None:
    kept = re.compile(r"^\w+: list\[Callable\[.*\] = \[\]", re.MULTILINE)
    found = {path.name for path in PACKAGE.rglob("*.py") if kept.search(path.read_text())}
    assert found == {"hooks.py", "replacements.py", "tracing.py", "work.py"}  # their own, of one module each
