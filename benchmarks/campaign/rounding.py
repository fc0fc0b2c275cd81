"""How far the numbers of two trainings lie apart."""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor

Results = dict[str, Tensor]

LEAST = 1e-4
"""Below this a number counts as this large. Inputs are of size 1: what is far smaller is what rounding left of them."""


def differences(found: Results, expected: Results) -> dict[str, float]:
    """By name, each as a share of the largest element, but of no less than `LEAST`.

    Of a gradient it is of no less than a thousandth of the largest of all gradients: next to it, some are but rounding.
    """
    if found.keys() != expected.keys():
        return {f"there is {sorted(found.keys() ^ expected.keys())} on one side only": math.inf}
    largest = max((size(value) for name, value in expected.items() if "gradient" in name), default=0.0)
    return {
        name: difference(found[name], value) / max(size(value), 1e-3 * largest if "gradient" in name else 0.0, LEAST)
        for name, value in expected.items()
    }


def size(x: Tensor) -> float:
    return float(x.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) if x.numel() else 0.0


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest difference; infinite for other shapes, and where one is finite and the other not."""
    if type(found) is not Tensor or found.shape != expected.shape:
        return math.inf
    a, b = found.double(), expected.double()
    if not torch.equal(a.isfinite(), b.isfinite()):
        return math.inf
    return size(torch.where(b.isfinite(), a - b, 0.0))


def error_of(found: Tensor, exact: Tensor) -> float:
    """The norm of a difference; infinite for other shapes."""
    return float((found.double() - exact).norm()) if found.shape == exact.shape else math.inf


def fingerprints(results: Results) -> dict[str, int]:
    """A number for each tensor that tells whether two ranks have the same bits."""
    return {name: zlib.crc32(value.double().numpy().tobytes()) for name, value in results.items()}
