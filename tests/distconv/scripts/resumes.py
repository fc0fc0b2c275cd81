"""Trains, goes on from its own last checkpoint, and prints the loss of each step: a plain script for one device.

The model's parts are saved into one folder again and again. With --die the second rank that torchrun starts kills
itself in the middle of the third time, in the first attempt.
"""

import argparse
import os
import signal

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, required=True)
parser.add_argument("--checkpoint", required=True)
parser.add_argument("--die", action="store_true")
options = parser.parse_args()

torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(4, 2, 8, 6), torch.randn(4, 2, 8, 6)
model = nn.Sequential(nn.Conv2d(2, 48, 3, padding=1), nn.Conv2d(48, 48, 3), nn.ReLU(), nn.ConvTranspose2d(48, 2, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
begin = 0
if os.path.exists(options.checkpoint):
    saved = torch.load(options.checkpoint)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=f"{options.checkpoint}.model")
    model.load_state_dict(state)
    optimizer.load_state_dict(saved["optimizer"])
    begin = saved["step"]

for step in range(begin, options.steps):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    print(step, f"{loss.item():.12f}", flush=True)
    if options.die and step == 2 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        torch.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    dcp.save(model.state_dict(), checkpoint_id=f"{options.checkpoint}.model")
    torch.save({"optimizer": optimizer.state_dict(), "step": step + 1}, f"{options.checkpoint}.new")
    os.replace(f"{options.checkpoint}.new", options.checkpoint)
