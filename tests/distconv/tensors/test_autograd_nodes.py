"""Autograd functions of a program with the names of distconv's own: they are the program's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from distconv.model import graph_entrance
from distconv.model.direct import shares
from distconv.rules.operands.sums import towards_parameter
from distconv.rules.products import linear
from distconv.rules.values.numbers import _recorded
from distconv.tensors.autograd_nodes import LAYOUT_CHANGES, PARAMETER_USES, PARAMETER_VIEWS
from distconv.transfer import redistribution

OURS = (shares._Use, graph_entrance._HandOver, linear.GatheredParameter, shares.FromRoot, redistribution._Redistribute)


def copying(name: str) -> type[torch.autograd.Function]:
    """A function of a program: the identity, and what autograd is said to compute towards in its backward."""

    def backward(ctx: Any, grad: Tensor) -> Tensor:
        found.append(towards_parameter())
        return grad

    found: list[bool] = []
    methods = {"forward": staticmethod(lambda ctx, x: x.clone()), "backward": staticmethod(backward), "found": found}
    return type(name, (torch.autograd.Function,), methods)


@pytest.mark.parametrize("name", [function.__name__ for function in OURS])
def test_a_programs_function_is_not_taken_for_ours(name):
    its, after = copying(name), copying("After")
    x = torch.ones(2, requires_grad=True)
    y = its.apply(x)
    assert _recorded(y) is y.grad_fn
    after.apply(y.t()).sum().backward()
    assert after.found == [False]


@pytest.mark.parametrize("function", OURS)
def test_ours_are_known(function):
    node = function._backward_cls()
    assert any(node in kind for kind in (LAYOUT_CHANGES, PARAMETER_USES, PARAMETER_VIEWS))
