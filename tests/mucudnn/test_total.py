"""Who holds how much of a total, and what of it is in use."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mucudnn.budgets import total
from mucudnn.budgets.total import ByteLedger, Shares
from mucudnn.optimizer import Division, Option, share


def menu(*costs: tuple[float, int]) -> list[Division]:
    """Of (seconds, bytes)."""
    return [Division((Option(1, "a", seconds, size),)) for seconds, size in costs]


menus = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=4).map(lambda costs: menu((10, 0), *costs))


def held(shares: Shares) -> int:
    return sum(kernel.share for kernel in shares.kernels.values())


@given(st.lists(menus, min_size=1, max_size=5), st.lists(st.integers(0, 14), max_size=80), st.integers(0, 30))
def test_shares_never_add_up_to_more_than_the_total(kinds: list[list[Division]], names: list[int], total: int) -> None:
    shared = Shares(total)
    for name in names:
        kernel = shared.call(name, kinds[name % len(kinds)])
        assert kernel is not None and kernel.share == (kernel.division.workspace if kernel.division else 0)
        assert held(shared) <= total


@given(st.lists(menus, min_size=1, max_size=6), st.integers(0, 30))
def test_a_second_round_has_the_best_division(kinds: list[list[Division]], total: int) -> None:
    shared = Shares(total)
    for number, kind in enumerate(kinds):
        kernel = shared.call(number, kind)
        assert kernel is not None and kernel.division is None
    best = share(kinds, total)
    for _ in range(2):
        assert [shared.call(number, kind).division for number, kind in enumerate(kinds)] == best  # type: ignore[union-attr]


def test_a_new_kernel_holds_nothing_until_the_next_round() -> None:
    shared, kind = Shares(10), menu((10, 0), (1, 10))
    for _ in range(2):
        shared.call("a", kind)
    assert shared.kernels["a"].share == 10
    faster = menu((100, 0), (1, 10))
    shared.call("b", faster)
    assert (shared.kernels["a"].share, shared.kernels["b"].share) == (10, 0)
    shared.call("a", kind)  # it was last called before the new one
    assert (shared.kernels["a"].share, shared.kernels["b"].share) == (10, 0)
    shared.call("b", faster)
    assert (shared.kernels["a"].share, shared.kernels["b"].share) == (0, 10)


def test_a_changed_menu_divides_again() -> None:
    shared, kinds = Shares(10), {"a": menu((10, 0), (1, 10)), "b": menu((9, 0), (1, 10))}
    for _ in range(2):
        for name, kind in kinds.items():
            shared.call(name, kind)
    assert [kernel.share for kernel in shared.kernels.values()] == [10, 0]
    del kinds["a"][1:]
    shared.change()
    for _ in range(2):
        for name, kind in kinds.items():
            shared.call(name, kind)
    assert [kernel.share for kernel in shared.kernels.values()] == [0, 10]


def test_what_is_no_longer_called_gives_its_share_back() -> None:
    shared, kind = Shares(10), menu((10, 0), (1, 10))
    for _ in range(2):
        shared.call("old", kind)
    for _ in range(3 * total.STALE):
        shared.call("new", menu((5, 0), (1, 10)))
    assert list(shared.kernels) == ["new"]
    assert shared.kernels["new"].share == 10


def test_weights_that_are_always_new_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(total, "MOST_KERNELS", 5)
    shared, kind = Shares(10), menu((10, 0), (1, 10))
    assert sum(shared.call(name, kind) is not None for name in range(20)) == 5


# What is in use.


def test_a_ledger_gives_no_more_than_there_is() -> None:
    ledger = ByteLedger(10)
    assert ledger.take(6) and not ledger.take(5) and ledger.take(4)
    ledger.give(6)
    assert ledger.take(6)


def test_a_ledger_in_many_threads() -> None:
    ledger, lock = ByteLedger(10), threading.Lock()
    now = most = 0

    def use(size: int) -> None:
        nonlocal now, most
        for _ in range(300):
            if ledger.take(size):
                with lock:
                    now += size
                    most = max(most, now)
                with lock:
                    now -= size
                ledger.give(size)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(use, (3, 4, 5, 6)))
    assert 0 < most <= 10


def test_measuring_waits_for_others_and_holds_them_off() -> None:
    ledger, order = ByteLedger(10), []
    assert ledger.take(1)

    def measure() -> None:
        with ledger.alone():
            order.append("alone")

    thread = threading.Thread(target=measure)
    thread.start()
    while ledger.take(0):  # until the other thread waits
        ledger.give(0)
    assert not ledger.take(9)
    order.append("given back")
    ledger.give(1)
    thread.join()
    assert order == ["given back", "alone"]
    assert ledger.take(10)
