"""What ranks read of files, with and without a store, counted by the operating system.

    python benchmarks/reading/reading.py            # about six minutes and 1.3 GiB of disk
    python benchmarks/reading/reading.py --save

Volumes of 4 x 64³, and of 4 x 128³ where slabs are compared with all, lie in HDF5 in chunks of which no two ranks of a
partition read the same. A shuffling DataLoader reads them on 4 ranks. Before each epoch the operating system is asked
to forget the file's pages (posix_fadvise(DONTNEED)). Ranks of one machine that read one file share its pages: what one
of them has brought from the disk, the others find in memory, so that reading all costs the disk no more than reading
slabs. On nodes of their own they would not: therefore slabs are also compared with all where each rank has a copy of
the file.

Bytes are those of /proc/self/io: what a process asked of files (rchar), and what came from a disk for it (read_bytes,
with what is read ahead). Seconds are medians; where this machine has fewer cores than ranks, the ranks wait for one
another, and the processor's time of a rank tells more than the clock.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import h5py
import numpy

from benchmarks.process import Process
from benchmarks.table import Table, conditions, save, show
from distconv.settings.partition import Partition

RESULT = "reading-cpu"
RANKS = 4
SAMPLES, SHAPE, BATCH = 16, (4, 64, 64, 64), 8
LARGE_SAMPLES, LARGE, LARGE_BATCH = 8, (4, 128, 128, 128), 4
BYTES = SAMPLES * 4 * SHAPE[0] * SHAPE[1] ** 3
PARTITIONS = ("depth=4", "height=4", "width=4", "sample=4", "sample=2,depth=2")
SPACE = "depth", "height", "width"
MIB = 1 << 20


def write(folder: Path, name: str, partition: str, shape: tuple[int, ...]) -> str:
    """A file of volumes in chunks of one sample, of which a rank of the partition reads whole ones."""
    path = folder / f"{name}-{partition}.h5"
    ranks = dict(Partition.parse(partition).axes)
    chunks = (1, shape[1], *(n // ranks.get(axis, 1) for n, axis in zip(shape[2:], SPACE, strict=True)))
    volumes = numpy.random.default_rng(0).standard_normal(shape, dtype=numpy.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("volume", data=volumes, chunks=chunks)
    with path.open("rb") as written:
        os.fsync(written.fileno())  # pages that are still to be written are not forgotten
    return str(path)


def warm_up(ranks: Process, folder: Path) -> None:
    """The first epochs load modules, which are files too."""
    path = write(folder, "first", "depth=4", (BATCH, *SHAPE))
    for shard, plain in ((True, False), (False, True)):
        partition = "depth=4" if ranks.name.startswith("4") else "sample=1"
        request = {"path": path, "batch": BATCH, "partition": partition, "epochs": 2, "shard": shard, "plain": plain}
        ranks.ask(what="read", store=False, **request)
    Path(path).unlink()


def started(ranks: int, folder: Path) -> Process:
    program = [sys.executable, str(ROOT / "benchmarks" / "reading" / "rank.py")]
    commands = [[*program, str(rank), str(ranks), str(folder / f"store-{ranks}")] for rank in range(ranks)]
    return Process(f"{ranks} ranks", commands, PYTHONPATH=str(ROOT), GLOO_SOCKET_IFNAME="lo")


def median(rows: list[list[dict[str, float]]], what: str) -> float:
    """Of the slowest rank of each epoch."""
    return statistics.median(max(rank[epoch][what] for rank in rows) for epoch in range(len(rows[0])))


def of_parts(ranks: Process, folder: Path) -> Table:
    """The bytes of each rank in two epochs, with and without a store."""
    cells, figures = [], {}
    for partition in PARTITIONS:
        path = write(folder, "volumes", partition, (SAMPLES, *SHAPE))
        request = {"what": "read", "path": path, "batch": BATCH, "partition": partition, "epochs": 2, "shard": True}
        without = ranks.ask(**request, store=False, plain=False)
        kept = ranks.ask(**request, store=True, plain=False)
        figures[partition] = {"without": without, "store": kept}
        share = BYTES / RANKS
        of_sample = share / SAMPLES * dict(Partition.parse(partition).axes).get("sample", 1)
        minimum = [rank[1]["missing"] * of_sample for rank in kept]
        cells.append(
            (
                partition,
                f"{share / MIB:.0f}",
                *(f"{max(rank[epoch]['asked'] for rank in without) / share:.3f}" for epoch in (0, 1)),
                *(f"{max(rank[epoch]['asked'] for rank in kept) / share:.3f}" for epoch in (0, 1)),
                f"{sum(rank[1]['disk'] for rank in kept)}",
                f"{sum(rank[1]['brought'] for rank in kept) / MIB:.1f}",
                f"{sum(minimum) / MIB:.1f}",
            )
        )
        Path(path).unlink()
    headings = (
        *("partition", "share of a rank, MiB", "epoch 1 / share", "epoch 2 / share"),
        *("with a store: epoch 1 / share", "epoch 2 / share", "epoch 2 from disk, bytes", "moved, MiB", "least, MiB"),
    )
    return Table("Bytes that the rank which reads most asks of files, and what moves between ranks", headings, cells)


def copies(path: str) -> str:
    """A copy of a file for each rank, as on nodes that share no cache; "{rank}" stands for its number."""
    for rank in range(RANKS):
        shutil.copyfile(path, f"{path}.{rank}")
        with open(f"{path}.{rank}", "rb") as written:
            os.fsync(written.fileno())
    return f"{path}.{{rank}}"


def of_all(ranks: Process, folder: Path, rounds: int, *, apart: bool) -> Table:
    """Slabs of 4 ranks against every rank reading all, of one file or `apart`, each of its own copy."""
    written = write(folder, "volumes", "depth=4", (LARGE_SAMPLES, *LARGE))
    path = copies(written) if apart else written
    request = {"what": "read", "path": path, "batch": LARGE_BATCH, "partition": "depth=4", "epochs": 1, "store": False}
    arms: dict[str, list[list[dict[str, float]]]] = {
        "all": [[] for _ in range(RANKS)],
        "slabs": [[] for _ in range(RANKS)],
    }
    for _ in range(rounds):
        for arm, rows in arms.items():
            for rank, found in enumerate(ranks.ask(**request, shard=arm == "slabs", plain=False)):
                rows[rank] += found
    for each in Path(written).parent.glob(f"{Path(written).name}*"):
        each.unlink()
    cells = [
        (
            {"all": "every rank reads all", "slabs": "each rank reads its slabs"}[arm],
            f"{sum(rank[0]['asked'] for rank in rows) / MIB:.0f}",
            f"{sum(rank[0]['disk'] for rank in rows) / MIB:.0f}",
            f"{1e3 * median(rows, 'wall'):.0f}",
            f"{median(rows, 'wall') / median(arms['all'], 'wall'):.2f}",
            f"{1e3 * median(rows, 'cpu'):.0f}",
            f"{median(rows, 'cpu') / median(arms['all'], 'cpu'):.2f}",
        )
        for arm, rows in arms.items()
    ]
    headings = (
        *("", "MiB of 4 ranks", "of them from a disk", "ms of an epoch", "ratio"),
        *("ms of the processor, a rank", "ratio"),
    )
    where = "each rank with a file of its own" if apart else "one file, one cache of pages"
    return Table(f"depth=4: slabs against all, an epoch of reading; {where}", headings, cells)


def of_one(alone: Process, folder: Path, rounds: int) -> Table:
    """One process: distconv's loader against torch's."""
    path = write(folder, "volumes", "sample=1", (SAMPLES, *SHAPE))
    request = {"what": "read", "path": path, "batch": BATCH, "partition": "sample=1", "epochs": 1, "store": False}
    arms: dict[str, list[list[dict[str, float]]]] = {"torch's DataLoader": [[]], "with --shard-data": [[]]}
    for _ in range(rounds):
        for arm, rows in arms.items():
            rows[0] += alone.ask(**request, shard=True, plain=arm.startswith("torch"))[0]
    Path(path).unlink()
    first = arms["torch's DataLoader"]
    cells = [
        (
            arm,
            f"{1e3 * median(rows, 'wall'):.0f}",
            f"{median(rows, 'wall') / median(first, 'wall'):.2f}",
            f"{1e3 * median(rows, 'cpu'):.0f}",
            f"{median(rows, 'cpu') / median(first, 'cpu'):.2f}",
        )
        for arm, rows in arms.items()
    ]
    headings = "one process", "ms of an epoch", "ratio", "ms of the processor", "ratio"
    return Table("One process: an epoch of reading", headings, cells)


def of_training(two: Process, folder: Path, rounds: int) -> Table:
    """Steps with batches from a store against steps on a batch that is in memory.

    The ratio is of two epochs that follow each other, so that what else the machine does is in both; of all rounds the
    median, and the quarters around it.
    """
    path = write(folder, "volumes", "sample=2", (8, 1, 64, 64, 64))
    found = two.ask(what="train", path=path, batch=2, partition="sample=2", rounds=rounds)
    Path(path).unlink()

    def epochs(arm: str, what: int) -> list[float]:
        """Of each round the mean over its steps and ranks."""
        of_rounds = zip(*(rank[arm] for rank in found), strict=True)
        return [statistics.fmean(step[what] for rank in each for step in rank) for each in of_rounds]

    def ratio(what: int) -> str:
        pairs = zip(epochs("store", what), epochs("memory", what), strict=True)
        low, middle, high = statistics.quantiles((one / other for one, other in pairs), n=4)
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"

    cells = [
        (
            {"memory": "one batch in memory", "store": "batches from the store"}[arm],
            f"{1e3 * statistics.median(epochs(arm, 0)):.0f}",
            ratio(0) if arm == "store" else "1",
            f"{1e3 * statistics.median(epochs(arm, 1)):.0f}",
            ratio(1) if arm == "store" else "1",
            f"{1e3 * statistics.median(epochs(arm, 2)):.1f}",
        )
        for arm in ("memory", "store")
    ]
    headings = (
        *("sample=2, U-Net of 8 channels, 64³", "ms of a step", "ratio (quarters of the rounds)"),
        *("ms of the processor, a rank", "ratio", "ms of a step until it has its batch"),
    )
    return Table(f"Training with the store's exchange behind the steps, {rounds} rounds of 4 steps", headings, cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="epochs of each arm (default %(default)s)")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{RESULT}.*")
    options = parser.parse_args()
    before = conditions()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with started(RANKS, folder) as ranks:
            warm_up(ranks, folder)
            parts = of_parts(ranks, folder)
            against = of_all(ranks, folder, options.rounds, apart=False)
            alone_against = of_all(ranks, folder, options.rounds, apart=True)
        with started(1, folder) as alone:
            warm_up(alone, folder)
            one = of_one(alone, folder, options.rounds)
        with started(2, folder) as two:
            training = of_training(two, folder, 3 * options.rounds)
    tables = [parts, against, alone_against, one, training]
    show(tables)
    if options.save:
        about = f"`python benchmarks/reading/reading.py --rounds {options.rounds}`: {before}"
        about += f"\n\n{__doc__.split(chr(10) * 2, 2)[2].strip()}"
        save(RESULT, "Reading on many ranks, on a CPU", about, tables)


if __name__ == "__main__":
    main()
