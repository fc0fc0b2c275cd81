"""Steps in which an allocation fails, one after the other, in a process of its own: a line of JSON for each.

LD_PRELOAD=failing_allocator.so python -m benchmarks.faults.out_of_memory_trial ARM LASTING EVERY FIRST
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import mucudnn.patching
from benchmarks.drawn_times import drawn_times
from mucudnn.devices.host import HostStopwatch

SETTINGS: dict[str, dict[str, Any]] = {
    "a limit": {"workspace_limit": "256KiB"},
    "a limit, bfloat16": {"workspace_limit": "256KiB"},
    "a total": {"total_workspace_size": "1MiB"},
    "a limit of memory": {"memory_limit": "1GiB"},
    "planned live": {"workspace_limit": "256KiB", "planning": "live", "database": ":memory:"},
    "while planning": {"workspace_limit": "256KiB", "policy": "undivided", "database": ":memory:"},
}
"""Of mucudnn, by arm."""

PLANNING_STEPS = {"a total": 4, "a limit of memory": 6, "planned live": 4, "while planning": 0}
"""Steps after which plans are made, or, live, tried; one where none is named."""

SLOWER = 1000
"""Live planning leaves convolutions to torch that take less than 0.1 ms: its watch runs this many times as fast."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of a tensor's norm."""

ALLOCATORS_OWN = "can't allocate memory"

true_laps = HostStopwatch.laps

Results = dict[str, Tensor]


class Allocator:
    """What stands before the C library's."""

    def __init__(self) -> None:
        library = ctypes.CDLL(None)
        if not hasattr(library, "failing_begin"):
            raise SystemExit("out_of_memory_trial: LD_PRELOAD does not name failing_allocator.so")
        library.failing_begin.argtypes = (ctypes.c_long, ctypes.c_int)
        library.failing_end.restype = library.failing_failures.restype = ctypes.c_long
        library.failing_held.restype = ctypes.c_size_t
        self.begin, self.end = library.failing_begin, library.failing_end
        self.failures, self.held = library.failing_failures, library.failing_held


def judged(said: str | None, error: float, leaked: int, gave_way: bool, silent: bool) -> tuple[str, str]:
    """The outcome of a step, and what there is to say of it.

    Args:
        said: the error that ended it; None where it went on to its end.
        error: the largest in it and in the next one, as a share of what is allowed.
        leaked: bytes that were not given back.
        gave_way: whether mucudnn told that it goes on by another plan.
        silent: whether it does so without a word.
    """
    if not error <= 1:
        return "wrong", f"{error:.3g} times what is allowed; {said}"
    if silent:
        return "unclear", "another plan, without a word"
    if said is not None and (ALLOCATORS_OWN not in said or "\n" in said.strip()):
        return "unclear", said
    if leaked > 0:
        return "leaked", f"{leaked} bytes; {said}"
    return ("ended", said) if said is not None else ("gave way" if gave_way else "went on", "")


def laps(watch: HostStopwatch) -> list[float]:
    """Those of a watch that runs too fast."""
    return [SLOWER * seconds for seconds in true_laps(watch)]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, groups=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 4, stride=2, padding=1),
    )


class Trial:
    """The network, how it is run, and what is right."""

    def __init__(self, arm: str, database: Path) -> None:
        self.arm, self.dtype = arm, torch.bfloat16 if "bfloat16" in arm else torch.float32
        self.settings = {"database": str(database), "progress": "off", "planning": "ahead", **SETTINGS[arm]}
        if self.dtype is torch.bfloat16:
            # In half types oneDNN has kernels (seen with torch 2.13) that write beyond their memory for small layers.
            torch.backends.mkldnn.set_flags(False)
        self.allocator = Allocator()
        self.x = torch.randn(8, 3, 17, 16, generator=torch.Generator().manual_seed(1)).to(self.dtype)
        self.model = network().to(self.dtype)
        self.exact = step(network().to(self.dtype).double(), self.x.double())

    def error(self, found: Results) -> float:
        """The largest difference of any result, relative to the norm of what is right."""
        return max(float((found[name].double() - value).norm() / value.norm()) for name, value in self.exact.items())

    def outcome(self, allocation: int, lasting: bool) -> dict[str, Any] | None:
        """What becomes of a step in which an allocation fails; None where it has not so many."""
        with (
            warnings.catch_warnings(record=True) as told,
            drawn_times(7),
            mock.patch.object(HostStopwatch, "laps", laps),
            mucudnn.patched(**self.settings) as session,
        ):
            warnings.simplefilter("always")
            for _ in range(PLANNING_STEPS.get(self.arm, 1)):
                self._step()
            plans = [record.parts for record in session.records()]
            told.clear()
            said, found = None, None
            before = self._held()
            self.allocator.begin(allocation, lasting)
            try:
                found = self._step()
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
            finally:
                count = self.allocator.end()
            if allocation > count:
                return None
            error_here = 0.0 if found is None else self.error(found)
            del found
            leaked = self._held() - before
            gave_way = any(each.filename == "mucudnn" for each in told)
            silent = bool(plans) and not gave_way and plans != [record.parts for record in session.records()]
            error_here = max(error_here, self.error(self._step()))
        outcome, why = judged(said, error_here / TOLERANCE[self.dtype], leaked, gave_way, silent)
        divided = sum(len(parts) > 1 or parts[0][1] != "stock" for parts in plans)
        return {"allocation": allocation, "outcome": outcome, "said": why[:300], "divided": divided}

    def _held(self) -> int:
        """Bytes of tensors between two steps."""
        self.model.zero_grad()
        gc.collect()
        return int(self.allocator.held())

    def _step(self) -> Results:
        return step(self.model, self.x)


def step(model: nn.Module, x: Tensor) -> Results:
    """Loss and gradients."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape)
    loss = (y * weights).sum()
    loss.backward()
    assert x.grad is not None
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), "x": x.grad, **gradients}


def main() -> None:
    arm, (lasting, every, allocation) = sys.argv[1], map(int, sys.argv[2:])
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(arm, Path(folder, "times.sqlite"))
        gc.freeze()  # of what is imported, nothing is collected: twice in each step it would be looked through
        while True:
            record = trial.outcome(allocation, bool(lasting))
            print(json.dumps(record), flush=True)
            if record is None:
                return
            allocation += every


if __name__ == "__main__":
    main()
