"""Runs benchmarks/gpu/fifteen.py with two steps more, before its own: one crashes, and one hangs."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    sys.path[0] = str(HERE.parents[2])
    from benchmarks.gpu import fifteen, steps

    steps.__path__.append(str(HERE))
    fifteen.STEPS = {"crash": 20.0, "hang": 3.0, **fifteen.STEPS}
    return fifteen.main()


if __name__ == "__main__":
    raise SystemExit(main())
