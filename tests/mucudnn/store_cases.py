"""Rows of a database, and the files that were set aside beside one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mucudnn.optimizer import Option

KEY: dict[str, Any] = {"direction": "forward", "x": (3, 64, 64), "groups": 1, "device": "cpu"}
FFT = Option(16, "fft", 0.25, 1 << 20)
GEMM = Option(16, "gemm", 0.5, 4096)


def keyed(*options: Option) -> dict[tuple[str, int], Option]:
    return {(option.algorithm, option.extent): option for option in options}


def set_aside(path: Path) -> list[Path]:
    return sorted(other for other in path.parent.iterdir() if ".damaged-" in other.name)


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(5000))
