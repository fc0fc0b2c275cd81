"""Providers whose launches take made-up times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from mucudnn.convolution.tile import Part
from mucudnn.devices import Host
from mucudnn.planning import trial_runner
from mucudnn.providers.fft import Fft
from mucudnn.providers.gemm import Gemm
from mucudnn.providers.stock import Stock
from mucudnn.runtime import watched

STOCK_SECONDS = 1.0


class MadeUp:
    """Seconds of launches by a clock of our own; torch's own kernel on the whole takes `STOCK_SECONDS`.

    Attributes:
        per_sample: seconds, by algorithm.
        late: times that a stopwatch is asked before it tells its laps.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **per_sample: float) -> None:
        self.per_sample, self.late, self.now = {"stock": STOCK_SECONDS, "fft": 3.0, "gemm": 3.0, **per_sample}, 0, 0.0
        self.read = 0
        for name, provider in {"stock": Stock, "fft": Fft, "gemm": Gemm}.items():
            monkeypatch.setattr(provider, "launch", self._launch(name, provider.launch))
        own, of_call = trial_runner.stock_result, watched.stock_call

        def stock_result(*arguments: Any) -> torch.Tensor:
            self.now += STOCK_SECONDS
            return of_call(*arguments) if len(arguments) == 1 else own(*arguments)

        monkeypatch.setattr(watched, "stock_call", stock_result)
        monkeypatch.setattr(trial_runner, "stock_result", stock_result)
        monkeypatch.setattr(Host, "stopwatch", lambda device: Watch(self))
        # Nor does what this processor could do at best tell anything of these times.
        monkeypatch.setattr(Host, "least_seconds", lambda *_: 0.0)
        # The host's own work takes real time, which is none of this clock's.
        monkeypatch.setattr(time, "perf_counter", lambda: 0.0)

    def _launch(self, name: str, own: Callable[..., None]) -> Callable[..., None]:
        def launch(provider: Any, algorithm: str, parts: Sequence[Part], accumulate: bool) -> None:
            self.now += sum(self.per_sample[name] * part.problem.extent / 8 for part in parts)
            own(provider, algorithm, parts, accumulate)

        return launch


class Watch:
    def __init__(self, machine: MadeUp) -> None:
        self._machine, self._marks, self._asked = machine, [machine.now], 0

    def lap(self) -> None:
        self._marks.append(self._machine.now)

    def laps(self) -> list[float] | None:
        self._asked += 1
        self._machine.read += 1
        if self._asked <= self._machine.late:
            return None
        return [end - start for start, end in zip(self._marks, self._marks[1:], strict=False)]
