"""Trains CosmoFlow to tell four cosmological parameters from a volume of matter; an ordinary script for one device.

    python examples/cosmoflow.py write universes/ --size 128 --samples 20
    python examples/cosmoflow.py train universes/ --epochs 2
    python -m distconv run --shard-data --partition depth=2 examples/cosmoflow.py train universes/

`write` makes files in the layout of the public cosmoUniverse data set, one for each universe: `full`, counts of
particles (size, size, size, 4) at four redshifts, and `unitPar`, the four parameters, scaled to [-1, 1]. The counts are
those of a log-normal random field whose amplitude, spectral index, smoothing length and growth are the parameters: not
physics, but to be learnt in the same way. `train` takes logarithms, normalises each volume by its own mean and
deviation, and keeps a checkpoint, from which it goes on. Every fifth universe is for validation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset
from tqdm import tqdm

PARAMETERS = ("amplitude", "spectral index", "smoothing length", "growth")
CHANNELS = 4
PARTICLES = 8.0  # of a voxel, on average


class CosmoFlow(nn.Module):
    """CosmoFlow (Mathuriya et al., SC 2018) as scaled to larger cubes by Oyama et al. (arXiv:2007.12856, 2020).

    Takes (N, channels, size, size, size), gives (N, parameters) in (-1.2, 1.2). Seven convolutions, the fourth with
    stride 2; as many of them, from the first, are followed by an average pooling as reduce the cube to 2 voxels a
    side: five at 128, seven at 512. So the number of parameters is that of the paper, 9.44 million, at every size.

    width: filters of the first convolution; they double up to 16 times that.
    batch_norm: normalise after each convolution, as their second variant does.

    Raises ValueError where size is not a power of two from 8 to 512.
    """

    def __init__(
        self,
        size: int = 128,
        channels: int = 4,
        parameters: int = 4,
        width: int = 16,
        hidden: tuple[int, int] = (2048, 256),
        dropout: float = 0.5,
        batch_norm: bool = False,
    ) -> None:
        super().__init__()
        if not 8 <= size <= 512 or size & (size - 1):
            raise ValueError(f"size of a CosmoFlow cube: {size}, not a power of two from 8 to 512")
        poolings = size.bit_length() - 3
        layers: list[nn.Module] = []
        for index in range(7):
            outputs = width * 2 ** min(index, 4)
            stride = 2 if index == 3 else 1
            layers.append(nn.Conv3d(channels, outputs, 3, stride=stride, padding=1, bias=not batch_norm))
            if batch_norm:
                layers.append(nn.BatchNorm3d(outputs))
            layers.append(nn.LeakyReLU(0.3))
            if index < poolings:
                layers.append(nn.AvgPool3d(3, stride=2, padding=1))
            channels = outputs
        self.features = nn.Sequential(*layers)
        self.regressor = nn.Sequential(
            nn.Linear(channels * 2**3, hidden[0]),
            nn.LeakyReLU(0.3),
            nn.Dropout(dropout),
            nn.Linear(hidden[0], hidden[1]),
            nn.LeakyReLU(0.3),
            nn.Dropout(dropout),
            nn.Linear(hidden[1], parameters),
            nn.Tanh(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return 1.2 * self.regressor(self.features(x).flatten(1))


def stop(message: str) -> None:
    """Ends the program for bad input: one line, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def universe(size: int, parameters: numpy.ndarray, rng: numpy.random.Generator) -> numpy.ndarray:
    """Counts (size, size, size, 4) of a log-normal field; the parameters are in [-1, 1], in the order of PARAMETERS."""
    amplitude, index, smoothing, growth = parameters
    along = numpy.fft.fftfreq(size).astype("f4") ** 2
    last = numpy.fft.rfftfreq(size).astype("f4") ** 2
    square = along[:, None, None] + along[None, :, None] + last
    square[0, 0, 0] = 1  # the mean, which is set to zero below
    spectrum = square ** numpy.float32(-0.75 + 0.25 * index)
    spectrum *= numpy.exp(square * numpy.float32(-10 * (1.5 + smoothing)))
    spectrum[0, 0, 0] = 0
    field = numpy.fft.irfftn(
        numpy.fft.rfftn(rng.standard_normal((size,) * 3, dtype="f4")) * spectrum, s=(size,) * 3, axes=(0, 1, 2)
    )
    field *= (1 + 0.4 * amplitude) / field.std()
    counts = numpy.empty((size, size, size, CHANNELS), "i2")
    for redshift in range(CHANNELS):
        grown = field * (1 + 0.2 * growth) ** -redshift
        counts[..., redshift] = rng.poisson(PARTICLES * numpy.exp(grown - grown.var() / 2)).clip(0, 32767)
    return counts


def write(folder: Path, size: int, samples: int, seed: int) -> None:
    """Files of universes, each whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in tqdm(range(samples), desc="universes", disable=None):
        rng = numpy.random.default_rng((seed, number))
        parameters = rng.uniform(-1, 1, len(PARAMETERS)).astype("f4")
        path = folder / f"univ_{number:05d}.hdf5"
        partial = f"{path}.{os.getpid()}"
        with h5py.File(partial, "w") as file:
            file["full"] = universe(size, parameters, rng)
            file["unitPar"] = parameters
            file["namePar"] = numpy.array(PARAMETERS, "S")
        os.replace(partial, path)


class Universes(Dataset[tuple[Tensor, Tensor]]):
    """Volumes (4, size, size, size) and their parameters (4,)."""

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = list(files)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        with h5py.File(self.files[index], "r") as file:
            volume = numpy.log1p(file["full"][:].astype("float32"))
            parameters = file["unitPar"][:]
        volume = (volume - volume.mean()) / volume.std()
        return torch.from_numpy(volume).permute(3, 0, 1, 2), torch.from_numpy(parameters)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="make files of universes")
    training = commands.add_parser("train", help="train on them")
    for one in (writing, training):
        one.add_argument("folder", type=Path, help="of the files")
        one.add_argument("--seed", type=int, default=0, help="(default %(default)s)")
    writing.add_argument(
        "--size", type=int, default=128, help="voxels along a side, a power of two from 8 to 512 (default %(default)s)"
    )
    writing.add_argument("--samples", type=int, default=20, help="universes (default %(default)s)")
    training.add_argument("--epochs", type=int, default=2, help="(default %(default)s)")
    training.add_argument("--batch", type=int, default=2, help="universes of a step (default %(default)s)")
    training.add_argument("--rate", type=float, default=5e-4, help="highest learning rate (default %(default)s)")
    training.add_argument("--width", type=int, default=16, help="filters of the first layer (default %(default)s)")
    training.add_argument("--dropout", type=float, default=0.5, help="(default %(default)s)")
    training.add_argument("--workers", type=int, default=0, help="of the DataLoader (default %(default)s)")
    training.add_argument("--device", default="cpu", help="such as cpu or cuda (default %(default)s)")
    training.add_argument("--checkpoint", type=Path, help="write it there after each epoch, and go on from it")
    training.add_argument("--json", type=Path, help="write losses and seconds there")
    chosen = parser.parse_args(given)
    for name in ("size", "samples", "epochs", "batch", "width"):
        if getattr(chosen, name, 1) < 1:
            stop(f"--{name} {getattr(chosen, name)}: not a positive number")
    return chosen


def loss_of(model: nn.Module, batch: Sequence[Tensor], device: str) -> Tensor:
    volumes, parameters = (part.to(device) for part in batch)
    return F.mse_loss(model(volumes), parameters)


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Losses of all steps, validation losses of all epochs, and seconds of the steps."""
    files = sorted(options.folder.glob("*.hdf5"))
    if len(files) < 2:
        stop(f"{options.folder}: fewer than two files *.hdf5; accepted: what `write` has made")
    with h5py.File(files[0], "r") as file:
        size = file["full"].shape[0]
    torch.manual_seed(options.seed)
    universes = Universes(files)
    held_out = range(4, len(files), 5) if len(files) > 4 else [len(files) - 1]
    trained = Subset(universes, [number for number in range(len(files)) if number not in set(held_out)])
    made = {"num_workers": options.workers, "persistent_workers": options.workers > 0}
    loader = DataLoader(trained, options.batch, shuffle=True, drop_last=len(trained) > options.batch, **made)
    validation = DataLoader(Subset(universes, held_out), options.batch, **made)

    model = CosmoFlow(size, CHANNELS, len(PARAMETERS), options.width, dropout=options.dropout).to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.rate, total_steps=options.epochs * len(loader))
    record: dict[str, Any] = {"losses": [], "validation": [], "seconds": []}
    begin = 0
    if options.checkpoint and options.checkpoint.exists():
        saved = torch.load(options.checkpoint)
        for name, part in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
            part.load_state_dict(saved[name])
        record, begin = saved["record"], len(saved["record"]["validation"])
    for epoch in range(begin, options.epochs):
        model.train()
        now = time.perf_counter()
        for batch in tqdm(loader, desc=f"epoch {epoch + 1}", disable=None):
            optimizer.zero_grad()
            loss = loss_of(model, batch, options.device)
            loss.backward()
            optimizer.step()
            schedule.step()
            record["losses"].append(loss.item())
            record["seconds"].append(time.perf_counter() - now)
            now = time.perf_counter()
        model.eval()
        with torch.no_grad():
            losses = [loss_of(model, batch, options.device).item() for batch in validation]
        record["validation"].append(statistics.fmean(losses))
        print(
            f"epoch {epoch + 1}  loss {record['losses'][-1]:.6f}  validation {record['validation'][-1]:.6f}", flush=True
        )
        if options.checkpoint:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            partial = f"{options.checkpoint}.{os.getpid()}"
            torch.save({**state, "record": record}, partial)
            os.replace(partial, options.checkpoint)
    return record


def main(given: Sequence[str] | None = None) -> list[float]:
    """The losses of all steps, and of validation."""
    options = arguments(given)
    if options.command == "write":
        write(options.folder, options.size, options.samples, options.seed)
        return []
    record = train(options)
    if record["seconds"]:
        print(f"seconds per step (median): {statistics.median(record['seconds'][1:] or record['seconds']):.3f}")
    if options.json:
        options.json.write_text(json.dumps(record) + "\n")
    losses: list[float] = record["losses"] + record["validation"]
    return losses


if __name__ == "__main__":
    main()
