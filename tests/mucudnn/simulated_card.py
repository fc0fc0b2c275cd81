"""A GPU that is not there, with handles and scratch memory for the simulated cuDNN."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from ctypes import c_void_p

import torch
from simulated_cudnn import SimulatedCudnn

from mucudnn.providers.cudnn.graph import PlannedCard
from mucudnn.providers.cudnn.library import Library


class SimulatedCard:
    """Stands in for `mucudnn.providers.cudnn.card.Card`.

    Attributes:
        scratches: bytes of the workspaces that were asked for.
    """

    def __init__(self) -> None:
        self.simulated = SimulatedCudnn()
        self.library: Library = self.simulated
        self.scratches: list[int] = []
        self._device = PlannedCard(handle=c_void_p(32))

    def planning(self) -> AbstractContextManager[PlannedCard]:
        return nullcontext(self._device)

    def handle(self) -> c_void_p:
        self.library.cudnnSetStream(c_void_p(16), 7)
        return c_void_p(16)

    def scratch(self, size: int) -> torch.Tensor:
        self.scratches.append(size)
        return torch.empty(size, dtype=torch.uint8)

    def is_current(self) -> bool:
        return True

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()
