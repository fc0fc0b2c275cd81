"""Host time of single operators, for `host.py`: how much longer a chain of sixteen takes than none."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import distconv
from benchmarks.table import Table

WARM, LENGTH, CHANNELS = 3, 16, 4


class _Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x


OPERATORS: dict[str, Callable[[], nn.Module]] = {
    "convolution 3x3": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False),
    "batch norm": lambda: nn.BatchNorm2d(CHANNELS),
    "ReLU": nn.ReLU,
    "max pool 3x3": lambda: nn.MaxPool2d(3, 1, 1),
    "add": _Sum,
}

Figures = dict[str, dict[str, tuple[float, float]]]
"""By operator and arm: microseconds forward, and forward and backward."""


def _chain(make: Callable[[], nn.Module], length: int, arm: str) -> nn.Module:
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 1), *(make() for _ in range(length))]
    model: nn.Module = nn.Sequential(*layers)
    if arm != "plain":
        model = distconv.parallelize(model, distconv.init(arm, device_type="cpu"))
    return model


def measured(arms: Sequence[str], rounds: int) -> Figures:
    """Medians of chains in turn: those with the operators less those without."""
    x = torch.randn(4, CHANNELS, 8, 8)
    found: Figures = {}
    for name, make in OPERATORS.items():
        models = {(arm, length): _chain(make, length, arm) for arm in arms for length in (0, LENGTH)}
        times: dict[tuple[str, int], list[tuple[float, float]]] = {key: [] for key in models}
        for _ in range(WARM + rounds):
            for key, model in models.items():
                model.zero_grad(set_to_none=True)
                start = time.process_time()
                y = model(x)
                forward = time.process_time() - start
                loss = y.sum()
                start = time.process_time()
                loss.backward()
                times[key].append((forward, forward + time.process_time() - start))

        def median(arm: str, length: int, of: int, times: dict[tuple[str, int], list[tuple[float, float]]]) -> float:
            return statistics.median(each[of] for each in times[arm, length][WARM:])

        found[name] = {}
        for arm in arms:
            forward, both = (
                1e6 * (median(arm, LENGTH, of, times) - median(arm, 0, of, times)) / LENGTH for of in (0, 1)
            )
            found[name][arm] = forward, both
    return found


def table(figures: Figures) -> Table:
    """A row per operator, a column per arm."""
    arms = list(next(iter(figures.values())))
    rows = [(name, *(f"{found[arm][0]:.0f} / {found[arm][1]:.0f}" for arm in arms)) for name, found in figures.items()]
    return Table("An operator on 4 channels of 8x8: microseconds forward / forward and backward", ("", *arms), rows)
