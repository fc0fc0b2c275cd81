"""Ways to let one process compute a model's calls otherwise than plain torch does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

import distconv

WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "parts": lambda net: distconv.in_turn(net, "height=2"),
    "a limit": lambda net: distconv.fit(net, "1GiB"),
    "a small limit": lambda net: distconv.fit(net, "1KiB"),
}
