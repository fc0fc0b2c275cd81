"""Pooling: maximum and average windows, and adaptive ones, with samples and space sharded.

``window`` and ``adaptive`` have the rules, ``positions`` the meaning of the indices of a maximum, and ``operator`` what
both read from an operator.
"""

from __future__ import annotations

from distconv.rules.pooling import window as _window
from distconv.rules.pooling.operator import adaptive
from distconv.rules.registry import above_autograd

RULES = (_window,)  # The modules whose import registers the rules: this one imports the adaptive pools.


def _whole_averages(spatial: int) -> None:
    """torch makes a mean of ``aten::adaptive_avg_poolNd`` where the output size is 1."""
    inner = adaptive("avg", spatial)
    above_autograd(f"aten::adaptive_avg_pool{spatial}d")(lambda x, size: inner(x, size))


for _spatial in (2, 3):
    _whole_averages(_spatial)
