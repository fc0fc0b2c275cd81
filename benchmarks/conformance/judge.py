"""Numbers of a layer: what one process computes, how they lie in a file for another program, and how they compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

Numbers = Mapping[str, np.ndarray]
"""Of an answer: output, input (its gradient), and the gradient of every parameter by the parameter's name."""

TOLERANCE = 1e-9
"""The largest difference from one process that is right, relative to the largest element, in float64."""

FLOOR = 1e-6
"""What counts as the largest element of a gradient that is smaller than this part of the largest of all."""


def write(path: Path, numbers: Numbers) -> None:
    np.savez(path, **numbers)  # type: ignore[arg-type]


def read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return dict(file)


def difference(found: Numbers, expected: Numbers) -> tuple[float, str]:
    """The largest relative difference, and what has it; infinite where something is missing or has another shape."""
    for name in expected.keys() ^ found.keys():
        return np.inf, name
    largest = max(float(np.abs(value).max()) for value in expected.values())
    errors = {name: _error(found[name], value, FLOOR * largest) for name, value in expected.items()}
    where = max(errors, key=lambda name: errors[name])
    return errors[where], where


def _error(found: np.ndarray, expected: np.ndarray, floor: float) -> float:
    if found.shape != expected.shape:
        return np.inf
    error = float(np.abs(found - expected).max()) / max(float(np.abs(expected).max()), floor)
    return np.inf if np.isnan(error) else error


def judge(answers: Sequence[Numbers], expected: Numbers) -> tuple[str, str]:
    """right or wrong, and what is: the answers of all ranks, each of which has the whole of every tensor."""
    error, where = max((difference(answer, expected) for answer in answers), key=lambda found: found[0])
    if error <= TOLERANCE:
        return "right", ""
    return "wrong", f"{where} is off by {error:.1e}" if np.isfinite(
        error
    ) else f"{where} is missing, not finite or of another shape"
