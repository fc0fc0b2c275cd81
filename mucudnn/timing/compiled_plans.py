"""The plans that cuDNN compiled at run time, in the database: a later run restores them."""

from __future__ import annotations

from typing import Any

from mucudnn.convolution.problem import ConvProblem
from mucudnn.devices import Device
from mucudnn.timing.store import Store


class CompiledPlans:
    """Compiled plans of one kind of device under one version of cuDNN, by problem and launch."""

    def __init__(self, store: Store, device: Device) -> None:
        self._store, self._device = store, device

    def compiled_plan(self, problem: ConvProblem, launch: str) -> str | None:
        return self._store.compiled_plan(self._key(problem), launch)

    def keep_compiled_plan(self, problem: ConvProblem, launch: str, text: str) -> None:
        self._store.keep_compiled_plan(self._key(problem), launch, text)

    def _key(self, problem: ConvProblem) -> dict[str, Any]:
        return {**problem.launch_key(), "device": self._device.name, "libraries": self._device.libraries}
