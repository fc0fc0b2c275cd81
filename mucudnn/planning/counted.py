"""Providers whose workspace includes the scratch memory of torch's own kernels.

This memory consists of the columns of plain kernels, oneDNN's scratchpads and reordered tensors, and on a GPU cuDNN's
workspaces: all that torch's allocator sees on the calling thread. Code and tables of libraries are not counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import torch

from mucudnn.convolution.call import Operands
from mucudnn.convolution.problem import ConvProblem
from mucudnn.convolution.tile import Part
from mucudnn.devices import device_of
from mucudnn.devices.allocations import peak_bytes
from mucudnn.providers import Provider, stock_result
from mucudnn.providers.columns import columns_bytes
from mucudnn.providers.layout import Layout
from mucudnn.providers.slices import Slices
from mucudnn.providers.stock import Stock, evened
from mucudnn.timing.logbook import Environment
from mucudnn.timing.measurement import synthetic_operands

HOST = torch.device("cpu")


class Counted:
    """Torch's own kernel on parts, of which each call's scratch memory counts as workspace, too."""

    def __init__(self, provider: Stock, scratch: Callable[[ConvProblem], int]) -> None:
        self._provider, self._scratch = provider, scratch

    def algorithms(self, problem: ConvProblem) -> Sequence[str]:
        return self._provider.algorithms(problem)

    def serves(self, problem: ConvProblem, algorithm: str) -> bool:
        return self._provider.serves(problem, algorithm)

    def workspace(self, problem: ConvProblem, algorithm: str) -> int:
        return self._provider.workspace(problem, algorithm) + self._scratch(evened(problem).problem)

    def launch(self, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
        self._provider.launch(algorithm, parts, accumulate)


def counted(provider: Provider, place: torch.device = HOST) -> Provider:
    """The provider; the scratch memory of torch's own kernels on the device `place` is counted by a call of each."""
    return _counted(provider, partial(scratch, place=place))


def counted_columns(provider: Provider) -> Provider:
    """The provider; the columns of torch's own kernels on the host are counted by their formula."""
    return _counted(provider, columns_bytes)


def _counted(provider: Provider, of: Callable[[ConvProblem], int]) -> Provider:
    if isinstance(provider, Stock):
        return Counted(provider, of)
    if isinstance(provider, Slices):
        return provider.counting(of)
    return provider.over(partial(_counted, of=of)) if isinstance(provider, Layout) else provider


def counting(environment: Environment) -> Environment:
    """The environment under another name, for which the database keeps the workspaces with this scratch memory."""
    return replace(environment, libraries=f"{environment.libraries}, scratch of torch's own kernels counted")


def scratch(problem: ConvProblem, place: torch.device = HOST) -> int:
    """Bytes of torch's own kernel beyond operands and result at its peak, on contiguous or channels-last zeros."""
    return _scratch(problem, place, device_of(place).switches())


@lru_cache(maxsize=4096)
def _scratch(problem: ConvProblem, place: torch.device, switches: tuple[object, ...]) -> int:
    """`scratch`, cached also by the switches of torch that a program may change."""
    given = synthetic_operands(problem, place, torch.zeros)
    if device_of(place).uses_cudnn:
        stock_result(problem, given)  # a first call may try kernels that need more
    return scratch_of(problem, given)


def scratch_of(problem: ConvProblem, given: Operands) -> int:
    """Bytes of torch's own kernel beyond these operands and its result at its peak, by one call.

    Raises:
        RuntimeError: where it cannot be counted, or where the kernel fails.
    """
    peak = peak_bytes(lambda: stock_result(problem, given), given.w.device)
    return max(0, peak - problem.element_bytes * math.prod(problem.target_shape))
