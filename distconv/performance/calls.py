"""A recorded call of a kernel, prepared to be run again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import distconv.rules.convolution.kernels  # noqa: F401 - an operator that a call may name
from distconv.performance.events import KernelCall, Shape


def prepared(call: KernelCall) -> Callable[[], object]:
    """A function that runs a call on made-up numbers of the recorded shapes."""
    args, kwargs = tree_map(_tensor, (call.args, dict(call.kwargs)), is_leaf=lambda leaf: isinstance(leaf, Shape))
    if "device" in kwargs:
        kwargs["device"] = torch.device("cpu")

    def run() -> object:
        with torch.no_grad():
            return call.operator(*args, **kwargs)

    return run


def _tensor(leaf: object) -> object:
    """Numbers of a shape: random ones where they may be fractions, zeros, which every index accepts, elsewhere."""
    if not isinstance(leaf, Shape):
        return leaf
    span = sum((size - 1) * stride for size, stride in zip(leaf.sizes, leaf.strides, strict=True)) + 1
    numbers: Tensor = torch.zeros(max(span, 0), dtype=leaf.dtype)
    if leaf.dtype.is_floating_point:
        numbers.uniform_()
    return numbers.as_strided(leaf.sizes, leaf.strides)
