"""Trains on volumes in an HDF5 file, each of which is read when its turn comes.

With --shard-data a rank reads only its part of every volume, though the script knows nothing of ranks.

python examples/hdf5_volumes.py volumes.h5 --write
python examples/hdf5_volumes.py volumes.h5
python -m distconv run --shard-data --partition depth=2 examples/hdf5_volumes.py volumes.h5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import h5py
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def write(path: str, count: int, size: int) -> None:
    """Smooth random volumes (count, 1, size, size, size) and the mean of each, in chunks of a few slices."""
    numbers = np.random.default_rng(0)
    means = numbers.normal(size=count).astype("float32")
    with h5py.File(path, "w") as file:
        file["mean"] = means
        whole = file.create_dataset("volume", (count, 1, size, size, size), "float32", chunks=(1, 1, 4, size, size))
        for index in range(count):
            whole[index] = means[index] + numbers.normal(size=(1, size, size, size))


class Volumes(Dataset[tuple[Tensor, Tensor]]):
    """The volumes of a file, with their means."""

    def __init__(self, path: str) -> None:
        self.file = h5py.File(path)

    def __len__(self) -> int:
        return len(self.file["mean"])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(self.file["volume"][index]), torch.as_tensor(self.file["mean"][index])


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Trains, and returns the losses."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--write", action="store_true", help="write the file, and train nothing")
    parser.add_argument("--volumes", type=int, default=16)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    if options.write:
        write(options.file, options.volumes, options.size)
        return []
    return train(DataLoader(Volumes(options.file), batch_size=2, shuffle=True), options.epochs)


def train(loader: DataLoader[tuple[Tensor, Tensor]], epochs: int) -> list[float]:
    """Finds the mean of a volume by convolutions; the losses."""
    model = nn.Sequential(
        nn.Conv3d(1, 8, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv3d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(16, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for epoch in range(epochs):
        for volumes, means in loader:
            loss = nn.functional.mse_loss(model(volumes)[:, 0], means)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch}  loss {losses[-1]:.4f}", flush=True)
    return losses


if __name__ == "__main__":
    main()
