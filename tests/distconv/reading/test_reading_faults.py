"""Scripts whose data cannot be read: one line on all ranks."""

from __future__ import annotations

import os

import h5py
import numpy as np
import pytest
from jobs import SCRIPTS, launch

DYING = """
import os, signal, sys
import torch
from torch.utils.data import DataLoader, Dataset

class Dying(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)

with torch.profiler.record_function("first"):  # imports a module of torch 2.13, which tells of what is raised meanwhile
    pass
for batch in DataLoader(Dying(), 2, num_workers=1):
    pass
"""


def test_a_worker_that_dies_is_one_line(tmp_path):
    script = tmp_path / "dying.py"
    script.write_text(DYING)
    done = launch("alone", 2, "--shard-data", "--partition", "depth=2", str(script))
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line]
    assert "DataLoader worker" in lines[0] and lines[0].startswith("distconv: ")
    assert lines[1:] in ([], ["distconv: on rank 1 of 2"])


@pytest.mark.parametrize("what", ["file", "key"])
def test_what_one_rank_cannot_open_before_the_first_sample_is_one_line(tmp_path, what):
    script = SCRIPTS / "reads.py"
    for rank in range(1 if what == "file" else 2):
        with h5py.File(tmp_path / f"{rank}.h5", "w") as file:
            file["other" if rank else "volume"] = np.zeros((4, 1, 8, 8, 8))
    options = ("--show-ranks", "--shard-data", "--partition", "depth=2")
    done = launch("alone", 2, *options, str(script), str(tmp_path / "{rank}.h5"))
    assert done.returncode == 1
    first, *others = [line for line in done.stderr.splitlines() if line]
    assert first.startswith(f"distconv: {os.path.relpath(script)}:") and str(tmp_path / "1.h5") in first
    assert ("No such file" if what == "file" else "'volume' doesn't exist") in first
    assert others == ["distconv: on rank 1 of 2"]
