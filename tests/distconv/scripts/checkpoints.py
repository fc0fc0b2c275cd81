"""Saves a model's shards with torch.distributed.checkpoint, loads them again, and fails."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

import distconv

torch.manual_seed(0)
os.makedirs("sharded")
model = torch.nn.Conv2d(4, 4, 3, padding=1)
model(torch.randn(2, 4, 8, 8)).sum().backward()
dcp.save({"model": model.state_dict()}, checkpoint_id="sharded")
assert os.path.exists("sharded/.metadata") and len(os.listdir("sharded")) == 3
before = distconv.whole_state(model.state_dict())
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
state = {"model": model.state_dict()}
dcp.load(state, checkpoint_id="sharded")
model.load_state_dict(state["model"])
after = distconv.whole_state(model.state_dict())
assert all(torch.equal(before[name], after[name]) for name in before)
Path("note.txt").write_text(f"first {distconv.is_first()}")
raise RuntimeError("after the checkpoint")
