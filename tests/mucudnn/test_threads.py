"""Threads and forks: in whatever order threads come, nothing waits for ever and nothing of one is left to another."""

from __future__ import annotations

import ast
import os
import signal
import sys
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional

import mucudnn
from mucudnn import process
from mucudnn.budgets.total import ByteLedger
from mucudnn.process import environment, substituted
from mucudnn.runtime import fixed, shim
from mucudnn.runtime.fixed import Fixed
from mucudnn.runtime.session import Session
from mucudnn.runtime.shared_total import Layers
from mucudnn.runtime.watched import Watched
from mucudnn.timing import clock
from mucudnn.timing.measurement import Measurement

ROOT = Path(__file__).resolve().parents[2]
X, W = torch.randn(4, 3, 24, 24), torch.randn(4, 3, 5, 5)


def test_planning_waits_for_bytes_while_who_has_them_begins_to_explore(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deterministic algorithms are measured ahead, while another thread computes within a total."""
    has_bytes, waits = threading.Event(), threading.Event()
    run = Watched.run

    def slow(live: Watched, call: object) -> object:
        if threading.current_thread() is worker:
            has_bytes.set()
            assert waits.wait(60)
            session._planner_for(call)  # type: ignore[arg-type]
        return run(live, call)  # type: ignore[arg-type]

    monkeypatch.setattr(Watched, "run", slow)
    with mucudnn.patched(database=":memory:", planning="auto", total_workspace_size="64MiB") as session:
        assert session._workspace is not None
        changed = session._workspace.ledger._changed
        wait = changed.wait
        monkeypatch.setattr(changed, "wait", lambda *args: (waits.set(), wait(*args)))
        worker = threading.Thread(target=functional.conv2d, args=(X, W), daemon=True)
        worker.start()
        assert has_bytes.wait(60)
        torch.use_deterministic_algorithms(True)
        try:
            planner = threading.Thread(target=functional.conv2d, args=(X[:2], W), daemon=True)
            planner.start()
            for thread in (worker, planner):
                thread.join(60)
                assert not thread.is_alive(), "they wait for each other"
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("first_ends_first", [True, False])
def test_replacements_of_two_threads_end_in_any_order(first_ends_first: bool) -> None:
    owner = types.ModuleType("owner")
    owner.own = 0  # type: ignore[attr-defined]
    one, other = substituted(owner, own=1, new=1), substituted(owner, own=2, new=2)
    one.__enter__()
    other.__enter__()
    assert vars(owner)["own"] == vars(owner)["new"] == 2
    first, last = (one, other) if first_ends_first else (other, one)
    first.__exit__(None, None, None)
    assert vars(owner)["own"] == vars(owner)["new"] == (2 if first_ends_first else 1)
    last.__exit__(None, None, None)
    assert vars(owner)["own"] == 0 and "new" not in vars(owner)


def test_environment_variables_of_two_threads_end_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OF_TWO_THREADS", raising=False)
    one, other = environment(OF_TWO_THREADS="1"), environment(OF_TWO_THREADS="2")
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert os.environ["OF_TWO_THREADS"] == "2"
    other.__exit__(None, None, None)
    assert "OF_TWO_THREADS" not in os.environ


def test_what_cannot_be_replaced_stays_as_it_was() -> None:
    with pytest.raises(TypeError), substituted(int, real=1):  # of a type written in C
        pass
    owner = types.ModuleType("owner")
    with substituted(owner, new=1):
        assert owner.new == 1
    assert not hasattr(owner, "new")


def in_fork(action: Callable[[], bool]) -> bool:
    """Whether the action holds in a forked child, within a minute."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking while torch has threads
        child = os.fork()
    if child == 0:
        signal.alarm(60)
        code = 2
        try:
            code = 0 if action() else 1
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def locks_of(session: Session) -> list[threading.Lock]:
    """All locks of a session and of what it has, as far as attributes lead."""
    found, met, waiting = [], set[int](), [session, shim]
    while waiting:
        one = waiting.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, type(threading.Lock()) | type(threading.RLock()) | threading.Condition):
            found.append(one)
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif type(one).__module__.startswith("mucudnn") or one is shim:
            named = vars(one) if hasattr(one, "__dict__") else {}
            slots = [getattr(one, name, None) for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ())]
            waiting += [*named.values(), *slots]
    return found  # type: ignore[return-value]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.parametrize(
    "settings", [{}, {"workspace_limit": "peak"}, {"total_workspace_size": "8MiB"}], ids=["limit", "peak", "total"]
)
def test_a_child_computes_though_another_thread_had_every_lock_at_the_fork(settings: dict[str, str]) -> None:
    def compute(batch: int) -> bool:
        x, w = X[:batch].double().requires_grad_(), W.double().requires_grad_()
        functional.conv2d(x, w).sum().backward()
        return bool(mucudnn.report() is not None and w.grad is not None)

    def take() -> None:
        for lock in locks:
            lock.acquire()
        taken.set()
        ends.wait(120)
        for lock in reversed(locks):
            lock.release()

    with mucudnn.patched(database=":memory:", planning="ahead", **settings) as session:  # type: ignore[arg-type]
        compute(4)
        locks, taken, ends = locks_of(session), threading.Event(), threading.Event()
        assert len(locks) > 4
        other = threading.Thread(target=take)
        other.start()
        try:
            assert taken.wait(60)
            assert in_fork(lambda: compute(4) and compute(2))
        finally:
            ends.set()
            other.join()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_has_the_bytes_that_other_threads_had_at_the_fork() -> None:
    ledger = ByteLedger(10)

    def all_are_there() -> bool:
        with ledger.alone():
            pass
        return ledger.take(10)

    assert ledger.take(8)
    assert in_fork(all_are_there)
    assert not ledger.take(8)


def test_what_threads_register_at_once_is_all_called_in_a_child() -> None:
    class Known:
        def renew(self) -> None: ...

    def register() -> None:
        for one in made[len(made) // 2 :] if threading.current_thread() is other else made[: len(made) // 2]:
            process.in_child(one.renew)

    made, before = [Known() for _ in range(400)], len(process._actions)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        other = threading.Thread(target=register)
        other.start()
        register()
        other.join()
    finally:
        sys.setswitchinterval(interval)
    assert sum(type(owner) is Known for owner in process._actions) == len(made)
    made.clear()
    assert len(process._actions) <= before


@pytest.mark.parametrize("package", ["mucudnn", "distconv"])
def test_every_lock_is_renewed_in_the_child_of_a_fork(package: str) -> None:
    bare = []
    for path in (ROOT / package).rglob("*.py"):
        tree = ast.parse(path.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        renewed = {id(call.args[0]) for call in calls if ast.unparse(call.func) == "renewed"}
        kinds = {f"{owner}{name}" for owner in ("threading.", "") for name in ("Lock", "RLock", "Condition")}
        bare += [
            f"{path.name}:{call.lineno}"
            for call in calls
            if ast.unparse(call.func) in kinds and id(call) not in renewed
        ]
    assert bare == []


def test_weights_that_are_new_at_every_step_have_the_numbers_of_those_before() -> None:
    layers, kept = Layers(), [torch.randn(3), torch.randn(3)]
    for _ in range(5):
        new = [torch.randn(3) for _ in range(3)]
        assert [layers.number(weight) for weight in kept] == [0, 1]
        assert sorted(layers.number(weight) for weight in new) == [2, 3, 4]
        assert sorted(layers.number(weight.view(3, 1)) for weight in new) == [2, 3, 4]
        del new


def test_a_total_knows_as_many_kernels_as_there_are_layers_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "seconds", clock.first_seconds)
    monkeypatch.setattr(Measurement, "stock_seconds", lambda self: 1e3)  # so that workspace is worth having
    torch.manual_seed(0)
    module, kept = torch.nn.Sequential(*(torch.nn.Conv2d(8, 8, 9, padding=4) for _ in range(3))), []
    with mucudnn.patched(database=":memory:", planning="ahead", total_workspace_size="64MiB") as session:
        for _ in range(6):
            with torch.autocast("cpu", torch.bfloat16):
                loss = module(torch.randn(4, 8, 32, 32)).float().square().mean()
            loss.backward()
            del loss
            kept += [torch.empty(8, 8, 9, 9, dtype=torch.bfloat16) for _ in range(8)]  # where the copies of weights lay
        assert session._workspace is not None
        assert 3 <= len(session._workspace.shares.kernels) <= 3 + 2 + 3, "forward and both backward directions"


def test_few_plans_are_kept_for_work_that_a_gpu_has_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    finished: list[int] = []
    capturing = [False]

    class Busy:
        is_asynchronous = True

        def empty(self, *looks: object) -> torch.Tensor:
            return torch.empty(1)

        def is_capturing(self) -> bool:
            return capturing[0]

        def finish(self) -> None:
            finished.append(len(fixed.adopted.kept))

    device = Busy()

    def made() -> Fixed:
        problem = types.SimpleNamespace(target_shape=(1,), direction="forward")
        schedule = types.SimpleNamespace(launch=lambda operands: None, name="division")
        plan = types.SimpleNamespace(problem=problem, is_stock=False, schedule=schedule)
        return Fixed(plan, (1,), device)  # type: ignore[arg-type]

    monkeypatch.setattr(fixed, "MOST_ADOPTED", 8)
    monkeypatch.setattr(fixed, "adopted", fixed.Adopted())
    monkeypatch.setattr(fixed, "captured", [])
    used = [made() for _ in range(3)]
    for _ in range(100):
        made()
    assert len(fixed.adopted.kept) <= 8 and set(finished) == {9}
    assert {id(one.plan.schedule) for one in used} <= {id(schedule) for _, schedule, _ in fixed.adopted.kept}
    call = types.SimpleNamespace(input=X, operands=lambda target: None)
    used[0].run(call)  # type: ignore[arg-type]
    capturing[0] = True
    for _ in range(2):
        used[0].run(call)  # type: ignore[arg-type]
    assert fixed.captured == [used[0].plan.schedule], "a graph may run it at any time"
