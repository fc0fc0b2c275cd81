"""Noisy volumes of the MNI152 template in one file, HDF5 or a folder of Zarr, and a Dataset that reads them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from brain import stop, with_noise
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

SAMPLES = 8
"""Volumes of a file, each with noise of its own."""


def write(path: Path, image: Tensor, targets: Tensor, noise: float, generator: torch.Generator) -> None:
    """Arrays "t1" (samples, 1, *size) and "targets" (samples, 3, *size), one chunk a sample; whole or not at all."""
    t1 = torch.cat([with_noise(image, noise, generator) for _ in range(SAMPLES)])
    arrays = {"t1": t1.numpy(), "targets": targets.expand(SAMPLES, *targets.shape[1:]).numpy()}
    partial = Path(f"{path}.{os.getpid()}")
    if path.suffix == ".zarr":
        import zarr

        group = zarr.open_group(str(partial), mode="w")
        for name, array in arrays.items():
            group.create_array(name, data=array, chunks=(1, *array.shape[1:]))
        shutil.rmtree(path, ignore_errors=True)
    else:
        import h5py

        with h5py.File(partial, "w") as file:
            for name, array in arrays.items():
                file[name] = array
    os.replace(partial, path)


class Volumes(Dataset[tuple[Tensor, Tensor]]):
    """T1 (1, *size) and class probabilities (3, *size) of a file that `write` has made."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: tuple[int, Any] = (0, None)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.opened[0] != os.getpid():  # a file is opened once in every process
            self.opened = os.getpid(), _opened(self.path)
        file = self.opened[1]
        return torch.from_numpy(file["t1"][index]), torch.from_numpy(file["targets"][index])


def _opened(path: Path) -> Any:
    if path.suffix == ".zarr":
        import zarr

        return zarr.open_group(str(path), mode="r")
    import h5py

    return h5py.File(path, "r")


def batches(path: Path, size: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """Volumes of a file, one at a time, in another order in every epoch, without end."""
    if not path.exists():
        stop(f"--data {path}: no such file")
    file = _opened(path)
    found = tuple(file["t1"].shape[2:]) if "t1" in file else None
    if found != size:
        stop(f"--data {path}: holds volumes of {found}, not of --size {size}; --write makes them")
    loader = DataLoader(Volumes(path), 1, shuffle=True)
    while True:
        yield from loader
