"""How far measured times can be trusted: by how they spread, and by how much of the processors the ranks got."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

MOST_SPREAD = 0.15
"""The standard error of a typical figure, as a share of it, that predictions within 15 % can bear."""

LEAST_SHARE = 0.85
"""The least share that the ranks must have had of the processor time without other load."""


def standard_error(times: Sequence[float]) -> float:
    """The standard error of a median of times, as a share of it: 1.25 standard deviations by the root of their number.

    A standard deviation is 1/1.35 of the distance of the quartiles, for which a single straggler counts little.
    """
    first, median, third = statistics.quantiles(times, n=4, method="inclusive")
    return 1.25 / 1.35 * (third - first) / median / math.sqrt(len(times))


def doubt(errors: Sequence[float], shares: Sequence[float]) -> str:
    """One line that says why a calibration is not to be trusted; "" where nothing speaks against it.

    Args:
        errors: the standard errors of its figures, as shares of these.
        shares: of the processor time that its ranks would have had if nothing else had run.
    """
    spread, share = statistics.median(errors), statistics.median(shares)
    reasons = [f"figures are uncertain by {spread:.0%}"] * (spread > MOST_SPREAD)
    reasons += [f"ranks got {share:.0%} of their processor time"] * (share < LEAST_SHARE)
    return f"measured while processors had other work, or a limit: {', and '.join(reasons)}" * bool(reasons)
