"""Draws without a seed in every way it knows, asks how many processes there are, and prints all of it."""

from __future__ import annotations

import json
import os
import random
import secrets
import subprocess
import sys
import uuid

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID")


class Draws(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand()), np.random.default_rng().random()]


def refusal(call, *arguments, **named) -> str:
    try:
        call(*arguments, **named)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


drawn = {
    "torch": torch.rand(2).tolist(),
    "python": random.random(),
    "sample": random.sample(range(1000), 3),
    "numpy": np.random.permutation(50).tolist(),
    "default_rng": np.random.default_rng().random(),
    "RandomState": np.random.RandomState().rand(),
    "Random": random.Random().random(),
    "SystemRandom": random.SystemRandom().random(),
    "uuid4": str(uuid.uuid4()),
    "secrets": secrets.token_hex(4),
    "set": list({f"n{i}" for i in range(20)}),
    "workers": [[v.tolist() for v in batch] for batch in DataLoader(Draws(), 2, shuffle=True, num_workers=2)],
}
random.seed()
np.random.seed()
torch.seed()
drawn["seeded anew"] = [random.random(), np.random.rand(), float(torch.rand(()))]

child = subprocess.run(
    [sys.executable, "-c", f"import os; print([n for n in {VARIABLES} if n in os.environ])"],
    capture_output=True,
    text=True,
    check=True,
)
told = {
    "variables": [name for name in VARIABLES if name in os.environ],
    "child": child.stdout.strip(),
    "initialized": torch.distributed.is_initialized(),
    "get_rank": refusal(torch.distributed.get_rank),
    "get_world_size": refusal(torch.distributed.get_world_size),
    "barrier": refusal(torch.distributed.barrier),
    "sampler": refusal(DistributedSampler, Draws()),
    "wrapper": refusal(torch.nn.parallel.DistributedDataParallel, torch.nn.Linear(1, 1)),
    "accelerate": int(os.environ.get("WORLD_SIZE", "1")) > 1 or int(os.environ.get("PMI_SIZE", "1")) > 1,
}
if "mpi4py.MPI" in sys.modules:
    told["MPI"] = sys.modules["mpi4py.MPI"].COMM_WORLD.size
print(json.dumps({"drawn": drawn, "told": told}))
