"""Operators of plain tensors, once distconv has kernels before torch's: they compute as without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from distconv.rules import registrations as of_rules
from distconv.rules.registrations import registrations
from tests.ticking import ticking


@pytest.fixture
def before_ours() -> Iterator[Callable[[str], Any]]:
    """What calls the kernel at an operator's key of autograd before ours."""
    was_in_place = registrations._in_place
    registrations.take_back()
    yield lambda name: of_rules._as_before(name, "AutogradCPU")
    if was_in_place:
        registrations.put_in_place()


@pytest.mark.parametrize("name", ["mm", "linear"])
def test_other_threads_run_meanwhile(name: str, before_ours: Callable[[str], Any]) -> None:
    call, key = before_ours(f"aten::{name}"), torch._C.DispatchKey
    keyset = torch._C.DispatchKeySet(key.CPU).add(key.AutogradCPU)
    x = torch.randn(1500, 1500, requires_grad=True)
    with ticking() as ticks:
        begun = ticks()
        y = call(keyset, x, x)
        assert ticks() - begun >= 5
    expected = getattr(torch.ops.aten, name).default(x, x)
    assert torch.equal(y, expected) and y.grad_fn.name() == expected.grad_fn.name()
