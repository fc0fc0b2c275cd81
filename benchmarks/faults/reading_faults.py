"""How soon all ranks end, with one line, when data cannot be read.

    python benchmarks/faults/reading_faults.py            # about two minutes
    python benchmarks/faults/reading_faults.py --save

A script reads sound volumes, writes a checkpoint, and then reads volumes with a fault. Timed is how long after the
checkpoint the command `distconv run` has ended: everything that it started has ended by then. The checkpoint is read
again, and compared with what was written.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import h5py
import numpy
import torch

from benchmarks.table import Table, conditions, save, show

SAMPLES, SHAPE = 8, (2, 16, 16, 16)
ALLOWED = 10.0

SCRIPT = '''
"""Reads volumes for an epoch, keeps a checkpoint, and reads others: python reads.py SOUND FAULTY CHECKPOINT WORKERS."""
import os, sys, time
import h5py, torch
from torch.utils.data import DataLoader, Dataset

class Volumes(Dataset):
    def __init__(self, path):
        self.path = path.replace("{rank}", os.environ.get("RANK", "0"))
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with h5py.File(self.path, "r") as file:
            key = "volume" if "volume" in file or "odd" not in file else ("odd" if index == 5 else "even")
            volume = file[key][0 if key == "odd" else index]
        return torch.from_numpy(volume).float()

model = torch.nn.Conv3d(2, 2, 3, padding=1)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
sound, faulty, checkpoint, workers = sys.argv[1:]
for path in (sound, faulty):
    for batch in DataLoader(Volumes(path), 2, num_workers=int(workers)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    torch.save(model.state_dict(), checkpoint)
    print("checkpoint", time.time(), model.weight.sum().item(), flush=True)
'''


def volumes(path: Path, key: str = "volume", **options: object) -> None:
    array = numpy.random.default_rng(0).standard_normal((SAMPLES, *SHAPE), dtype="f4")
    with h5py.File(path, "w") as file:
        file.create_dataset(key, data=array, **options)


def truncated(path: Path) -> None:
    volumes(path)
    os.truncate(path, path.stat().st_size // 2)


def without_key(path: Path) -> None:
    volumes(path, "something else")


def another_shape(path: Path) -> None:
    volumes(path, "even")
    with h5py.File(path, "a") as file:
        file["odd"] = numpy.zeros((1, SHAPE[0], 8, *SHAPE[2:]), "f4")


def another_dtype(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["volume"] = numpy.zeros((SAMPLES, *SHAPE), ">f4")


def checksum(path: Path) -> None:
    volumes(path, chunks=(1, *SHAPE), fletcher32=True)
    with h5py.File(path, "r") as file:
        chunk = file["volume"].id.get_chunk_info(5)
    with path.open("r+b") as raw:
        raw.seek(chunk.byte_offset + chunk.size // 2)
        raw.write(b"\xff" * 8)


def for_some(path: Path) -> None:
    """The ranks have a copy each, but for the second."""
    for rank in (0, 2, 3):
        volumes(Path(str(path).replace("{rank}", str(rank))))


@dataclass(frozen=True)
class Fault:
    """Something that is wrong with a file.

    Attributes:
        make: writes the file.
        tells: what the line has to say.
    """

    make: Callable[[Path], None]
    tells: tuple[str, ...]
    name: str = "faulty.h5"
    options: tuple[str, ...] = ()


FAULTS = {
    "a truncated file": Fault(truncated, ("faulty.h5", "truncated", "sample 0")),
    "a missing key": Fault(without_key, ("faulty.h5", "'volume'", "sample 0")),
    "a sample of another shape": Fault(another_shape, ("faulty.h5", "sample 5", "[2, 8, 16, 16]")),
    "a dtype that torch lacks": Fault(another_dtype, ("faulty.h5", "'/volume'", "sample 0", "byte order")),
    "a chunk with a wrong checksum": Fault(checksum, ("faulty.h5", "'/volume'", "sample 5")),
    "a path that one rank cannot see": Fault(
        for_some, ("faulty-1.h5", "sample 0", "No such file"), "faulty-{rank}.h5", ("--show-ranks",)
    ),
}


def seconds(fault: Fault, folder: Path, workers: int) -> tuple[float, str]:
    """From the checkpoint to the end of the job, and the line. AssertionError where it ends otherwise."""
    script, sound, checkpoint = folder / "reads.py", folder / "sound.h5", folder / "checkpoint.pt"
    script.write_text(SCRIPT)
    volumes(sound)
    fault.make(folder / fault.name)
    ranks = ["run", *fault.options, "--shard-data", "--partition", "depth=4"]
    given = [str(script), str(sound), str(folder / fault.name), str(checkpoint), f"{workers}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "distconv", *ranks, *given]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=300)
    end = time.time()
    printed = [line.split() for line in done.stdout.splitlines()]
    assert done.returncode in (1, 2) and len(printed) == 1, (done.returncode, done.stdout, done.stderr)
    line = next(line for line in done.stderr.splitlines() if line)
    assert line.startswith("distconv: ") and all(each in line for each in fault.tells), done.stderr
    kept = torch.load(checkpoint)["weight"].sum().item()
    assert abs(kept - float(printed[0][2])) < 1e-5, (kept, printed)
    return end - float(printed[0][1]), line.replace(f"{folder}/", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0, help="of the DataLoader (default %(default)s)")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results/reading-faults.*")
    options = parser.parse_args()
    before, found = conditions(), {}
    for name, fault in FAULTS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = seconds(fault, Path(folder), options.workers)
        print(f"{name}: {found[name][0]:.1f} s: {found[name][1]}", flush=True)
    rows = [(name, f"{taken:.1f}", line) for name, (taken, line) in found.items()]
    tables = [Table("From the last checkpoint to the end of four ranks", ("fault", "s", "the line"), rows)]
    if options.save:
        about = f"`python benchmarks/faults/reading_faults.py`: {before}\n\n{__doc__.split(chr(10) * 2, 2)[2].strip()}"
        save("reading-faults", "Data that cannot be read", about, tables)
    show(tables)
    if late := [name for name, (taken, _) in found.items() if taken > ALLOWED]:
        raise SystemExit(f"later than {ALLOWED:g} s: {', '.join(late)}")


if __name__ == "__main__":
    main()
