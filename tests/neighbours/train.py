"""A script beside modules of its own whose names are also those of folders and files of this repository."""

from __future__ import annotations

import sys

import networks
import run
import strategy
import torch

import benchmarks
import optimizer
import tests

torch.manual_seed(0)
print(sys.path)
print([module.OWNER for module in (benchmarks, networks, optimizer, run, strategy, tests)])
model = networks.network().double()
choice = optimizer.choose(model.parameters())
x, labels = torch.randn(4, 3, 8, 8).double(), torch.randint(5, (4,))
for _ in range(2):
    loss = torch.nn.functional.cross_entropy(model(x), labels)
    choice.zero_grad()
    loss.backward()
    choice.step()
    print(f"{loss.item():.9f}")
