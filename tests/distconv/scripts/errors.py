"""Ends in the error that the first argument names, in code that runs after `distconv.is_first()` or on every rank."""

import sys
from pathlib import Path

import torch
from torch import nn

import distconv

how, folder = sys.argv[1:]
model = nn.Conv2d(1, 1, 3)
if how == "full" and distconv.is_first():
    with open("/dev/full", "w") as disk:
        disk.write("a log" * 10_000)
elif how == "read-only" and distconv.is_first():
    Path("/sys/kernel/log.csv").write_text("")  # where nobody may write
elif how == "unreadable":
    checkpoint = Path(folder, "checkpoint.pt")
    checkpoint.write_bytes(b"\x80\x02 cut short")
    model.load_state_dict(torch.load(checkpoint))
elif how == "nan":
    x = torch.ones(2, 1, 8, 8)
    x[0, 0, 0, 0] = float("nan")
    for _ in range(3):
        loss = model(x).mean()
        loss.backward()
        print(loss.item(), flush=True)
    sys.exit(0)
print("sum", model(torch.ones(2, 1, 8, 8)).sum().item())  # the others wait here
