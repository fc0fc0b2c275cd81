"""Prints the median seconds of a network's forward and backward on the ranks of a job: python -m distconv run ..."""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.prediction_cases import CASES

WARM, STEPS = 3, 9


def main(name: str) -> None:
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    x = torch.randn(case.shape)
    times = []
    for _ in range(WARM + STEPS):
        model.zero_grad()
        start = time.perf_counter()
        model(x).sum().backward()
        times.append(time.perf_counter() - start)
    print(statistics.median(times[WARM:]))


if __name__ == "__main__":
    main(sys.argv[1])
