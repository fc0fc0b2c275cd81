"""A script whose ranks keep what they have read."""

from __future__ import annotations

import h5py
import numpy as np
import torch
from jobs import SCRIPTS, launch
from torch.utils.data import DataLoader


def test_a_script_with_a_store(tmp_path):
    script, path = str(SCRIPTS / "reads.py"), str(tmp_path / "v.h5")
    with h5py.File(path, "w") as file:
        file["volume"] = np.random.default_rng(0).random((7, 2, 6, 9, 8), dtype=np.float32)
    done = launch("alone", 2, "--shard-data", "--store", "memory", "--partition", "sample=2", script, path)
    assert (done.returncode, done.stderr) == (0, "")
    printed = [float(line.split()[1]) for line in done.stdout.splitlines()]
    torch.manual_seed(0)
    with h5py.File(path, "r") as file:
        volumes = torch.from_numpy(file["volume"][:])
    expected = [batch.double().square().sum() for _ in range(2) for batch in DataLoader(volumes, 3, shuffle=True)]
    torch.testing.assert_close(torch.tensor(printed, dtype=torch.float64), torch.stack(expected))
    refused = launch("alone", 2, "--store", "memory", "--partition", "sample=2", script, path)
    assert refused.returncode == 2 and refused.stderr == (
        "distconv: --store keeps the data that each rank reads by itself: it needs --shard-data\n"
    )
