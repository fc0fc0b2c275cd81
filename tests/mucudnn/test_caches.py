"""What is kept by shapes has a bound: a program whose shapes keep changing does not fill the memory."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forced import forced
from torch.nn import functional

from mucudnn.process import Recent
from mucudnn.runtime import session, shim

ROOT = Path(__file__).resolve().parents[2]

BY_FEW = {
    "_weights": "devices",
    "device_of": "devices",
    "providers_on": "devices and the names of sets of engines",
    "stock_kernel": "two operators and two kinds of devices",
    "_rules": "files that an environment variable names",
    "_open_mpi_options": "programs named mpiexec",
    "_is_new": "torch's operators",
    "without_outputs": "torch's operators",
    "_class": "classes of parameters",
    "joint_group": "groups of ranks, each of which torch keeps for good",
    "urgent_group": "groups of ranks, each of which torch keeps for good",
    "lacks": "features that need private names of torch",
    "_was_there": "private names of torch",
}
"""Functions whose results are all kept, and what there are few of, by which they are kept."""


def caches() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    """Every function that has a cache: its place, the decorator, and itself."""
    for folder in ("distconv", "mucudnn", "optimizer"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                for decorator in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                    text = ast.unparse(decorator)
                    if text.startswith(("functools.cache", "functools.lru_cache", "cache", "lru_cache", "planned")):
                        yield f"{path.relative_to(ROOT)}: {node.name}", text, node


def test_every_cache_has_a_bound() -> None:
    found = {place: (text, node) for place, text, node in caches() if "cached_property" not in text}
    assert len(found) > 50
    unbounded = [
        place
        for place, (text, node) in found.items()
        if ("(" not in text or "None" in text) and (node.args.args or node.args.kwonlyargs) and node.name not in BY_FEW
    ]
    assert unbounded == []
    assert BY_FEW.keys() <= {node.name for _, node in found.values()}


def test_what_was_put_in_first_is_forgotten() -> None:
    recent: Recent[int, str] = Recent(3)
    for key in (1, 2, 3, 1, 4):
        recent[key] = str(key)
    assert dict(recent) == {2: "2", 3: "3", 4: "4"}
    assert recent.get(1) is None


def test_threads_may_put_in_at_once() -> None:
    recent: Recent[int, int] = Recent(5)

    def put(first: int) -> None:
        for number in range(first, first + 2000):
            recent[number] = number

    threads = [threading.Thread(target=put, args=(10_000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(recent) <= 5


def test_decisions_that_were_forgotten_are_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "MOST_SHAPES", 6)
    torch.manual_seed(0)
    w = torch.randn(3, 2, 3, 3, dtype=torch.float64, requires_grad=True)
    inputs = [torch.randn(2, 2, 5, 4 + width, dtype=torch.float64) for width in range(8)] * 2
    expected = [functional.conv2d(x, w).square().sum() for x in inputs]
    with forced("gemm"):
        for x, wanted in zip(inputs, expected, strict=True):
            loss = functional.conv2d(x, w).square().sum()
            torch.testing.assert_close(loss, wanted)
            gradient, of_torch = (torch.autograd.grad(each, w)[0] for each in (loss, wanted))
            torch.testing.assert_close(gradient, of_torch)
            serving = shim.current_session()
            assert serving is not None and len(serving.decisions) <= 6 and len(serving.records()) <= 6
