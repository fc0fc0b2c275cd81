"""Trains a small network, keeps a checkpoint of every step and goes on from the last: a plain script for one device.

    python benchmarks/faults/resuming.py --steps 40 --checkpoint /tmp/state.pt [--pause 0.01]

It prints the number of each step and its loss, to the last bit.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True, help="in all, those before the checkpoint included")
    parser.add_argument("--checkpoint", help="the file; without it nothing is kept")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after every step (%(default)s)")
    options = parser.parse_args()

    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    x, y = torch.randn(4, 2, 12, 10), torch.randn(4, 2, 12, 10)
    model = nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 5, padding=2), nn.ReLU(),
        nn.Conv2d(4, 2, 3, padding=1),
    )  # fmt: skip
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)
    begin = 0
    if options.checkpoint and os.path.exists(options.checkpoint):
        saved = torch.load(options.checkpoint)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        begin = saved["step"]

    for step in range(begin, options.steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        print(step, repr(loss.item()), flush=True)
        if options.checkpoint:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, f"{options.checkpoint}.new")
            os.replace(f"{options.checkpoint}.new", options.checkpoint)
        time.sleep(options.pause)


if __name__ == "__main__":
    main()
