"""Reads volumes, an HDF5 or Zarr array or a folder of HDF5 files, in batches for two epochs: for one device.

python reads.py PATH; "{rank}" in PATH is the rank's number.
"""

import os
import sys

import h5py
import torch
from torch.utils.data import DataLoader, Dataset

path = sys.argv[1].replace("{rank}", os.environ.get("RANK", "0"))


class Volumes(Dataset):
    def __init__(self):
        self.volumes = None
        if path.endswith(".zarr"):
            import zarr

            self.volumes = zarr.open_group(path, mode="r")["volume"]
        elif path.endswith(".h5"):
            self.volumes = h5py.File(path, "r")["volume"]

    def __len__(self):
        return len(os.listdir(path)) if self.volumes is None else self.volumes.shape[0]

    def __getitem__(self, index):
        if self.volumes is not None:
            return torch.from_numpy(self.volumes[index])
        with h5py.File(f"{path}/{index}.h5", "r") as file:
            return torch.from_numpy(file["volume"][:])


torch.manual_seed(0)
loader = DataLoader(Volumes(), 3, shuffle=True)
for epoch in range(2):
    for batch in loader:
        print(epoch, batch.double().square().sum().item(), flush=True)
