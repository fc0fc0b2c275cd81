"""Processor time of a call in turn of a small decoder, and what it takes to pass the baton.

    python benchmarks/turns/host.py
    NULL_CARD_ARITHMETIC=0 NULL_CARD_CONVOLUTIONS=0 \\
        python tests/null_card/build.py PYTHON benchmarks/turns/host.py --device cuda     # the host's share alone

PYTHON has torch's build for CUDA and diffusers. To compare two versions, run each several times, one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

import distconv
from benchmarks.table import Table, show
from distconv.agreement.samples import SampledElements
from distconv.rules import resize
from distconv.turns.parts import Parts

NARROW: dict[str, Any] = {
    "block_out_channels": (16, 32, 64, 64),
    "norm_num_groups": 8,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "layers_per_block": 2,
}
PARTS, LATENT, ROUNDS = 8, 16, 9


def milliseconds(work: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    began = clock()
    work()
    return 1e3 * (clock() - began)


def main() -> None:
    import diffusers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if options.device == "cuda":  # what parts read of tensors has no numbers here, as in null_peak.py
        SampledElements.changed = lambda *args: []  # type: ignore[method-assign]
        taps = resize.nearest_taps
        resize.nearest_taps = lambda *args: taps(*args[:-2], args[-2].cpu(), args[-1])
    decoder = diffusers.AutoencoderKL(**NARROW).eval().to(options.device)
    latent = torch.zeros(1, 4, LATENT, LATENT, device=options.device)
    passed: list[float] = []

    def noted(method: Callable[..., None]) -> Callable[..., None]:
        return lambda *args: passed.append(milliseconds(lambda: method(*args), time.thread_time))

    def calls() -> float:
        decoder.decode(latent)
        return statistics.median(milliseconds(lambda: decoder.decode(latent)) for _ in range(ROUNDS))

    with torch.inference_mode():
        whole = calls()
        Parts._arrive, Parts._leave = noted(Parts._arrive), noted(Parts._leave)  # type: ignore[method-assign]
        distconv.in_turn(decoder, f"height={PARTS}")
        in_turn = calls()
        passed.clear()
        decoder.decode(latent)
    turns = len(passed) // 2
    row = (options.device, f"{whole:.1f}", f"{in_turn:.0f}", str(turns), f"{sum(passed) / turns:.3f}")
    headings = ("device", "ms of one process", "ms in turn", "turns", "ms to save and restore for one")
    show([Table(f"Processor time of a call in {PARTS} parts", headings, [row])])


if __name__ == "__main__":
    main()
