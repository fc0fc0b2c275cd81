"""WD against brute force over every choice."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.optimizer import Division, Option, share

ROOT = Path(__file__).resolve().parents[2]


def division(seconds: float, workspace: int) -> Division:
    return Division((Option(1, "a", seconds, workspace),))


choices = st.lists(
    # Exact in binary: sums compare with ==.
    st.builds(division, st.integers(0, 64).map(lambda units: units / 8), st.integers(0, 20)),
    min_size=1,
    max_size=4,
)
networks = st.one_of(
    st.lists(choices, max_size=6),
    st.builds(lambda kinds, counts: [k for k, n in zip(kinds, counts, strict=False) for _ in range(n)],
              st.lists(choices, max_size=3), st.lists(st.integers(1, 3), max_size=3)),
)  # fmt: skip


def brute_force_seconds(kernels: list[list[Division]], total: float) -> float:
    return min(
        (sum(d.seconds for d in choice) for choice in itertools.product(*kernels)
         if sum(d.workspace for d in choice) <= total), default=math.inf,
    )  # fmt: skip


def seconds(found: list[Division]) -> float:
    return math.fsum(chosen.seconds for chosen in found)


def check(kernels: list[list[Division]], total: float) -> None:
    expected = brute_force_seconds(kernels, total)
    if expected == math.inf:
        smallest = sum(min(d.workspace for d in kernel) for kernel in kernels)
        assert smallest > total
        with pytest.raises(ValueError, match=f"fit no total below {smallest} bytes"):
            share(kernels, total)
        return
    found = share(kernels, total)
    assert seconds(found) == expected
    assert sum(chosen.workspace for chosen in found) <= total
    assert all(chosen in kernel for chosen, kernel in zip(found, kernels, strict=True))


@settings(max_examples=300)
@given(networks, st.one_of(st.integers(0, 90), st.just(math.inf)))
def test_the_fastest_choice_within_the_total(kernels: list[list[Division]], total: float) -> None:
    check(kernels, total)


def awkward(count: int, seed: int = 7) -> list[list[Division]]:
    """Kernels whose seconds saved are nearly proportional to their bytes, which is hard for bounds."""
    state = seed
    kernels = []
    for _ in range(count):
        kernel = []
        for _ in range(6):
            state = (1103515245 * state + 12345) % 2**31
            workspace = state % 100_003
            kernel.append(division((200_000 - workspace + state % 17) * 1e-6, workspace))
        kernels.append([*kernel, division(0.2, 0)])
    return kernels


def test_out_of_time_the_best_that_is_known_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels, total = awkward(40), 1_500_000
    optimum = seconds(share(kernels, total))
    monkeypatch.setattr("mucudnn.optimizer.sharing.TIME_LIMIT", -1.0)
    found = share(kernels, total)
    assert sum(chosen.workspace for chosen in found) <= total
    assert optimum <= seconds(found) < 1.01 * optimum


def test_the_choice_is_in_the_order_of_the_kernels() -> None:
    kernels = [[division(3, 0), division(1, 8)], [division(3, 0), division(2, 8)]]
    assert share(kernels, 8) == [kernels[0][1], kernels[1][0]]
    assert share([], 0) == []


def test_a_kernel_takes_at_least_one_division() -> None:
    with pytest.raises(ValueError, match=r"kernels\[1\] has no divisions"):
        share([[division(1, 0)], []], 8)
