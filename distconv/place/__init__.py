"""The place of this process among the ranks of a job. It needs no torch: a rank reads it before it imports that."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """This process among the ranks of a job that mpiexec or a torchrun-like launcher started."""

    rank: int
    size: int | None  # None where only MPI itself knows it
    local_rank: int
    mpi: bool


MPI_VARIABLES = (
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMIX_RANK", "SLURM_NTASKS", "SLURM_LOCALID"),
)
"""Variables of MPI's launchers: a process's rank, the number of ranks, and the rank on its machine."""


_OF_TORCHRUN = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "DISTCONV_FILES"),
}
_BEGINNINGS = ("TORCHELASTIC_", "PMI", "OMPI_", "PRTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")


def without_place(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that a rank starts and that is none: without the variables of launchers."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _OF_TORCHRUN and not name.startswith(_BEGINNINGS)
    }


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The rank by the environment; None where this process was started alone."""
    if all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")):
        rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        return Place(rank, size, int(environment.get("LOCAL_RANK", rank)), mpi=False)
    for rank_name, size_name, local_name in MPI_VARIABLES:
        if rank_name in environment:
            rank = int(environment[rank_name])
            known = int(environment[size_name]) if size_name in environment else None
            if known == 1:
                continue  # a batch system's shell looks like this too
            return Place(rank, known, int(environment.get(local_name, rank)), mpi=True)
    return None


def is_run() -> bool:
    """Whether this process is `distconv run` or `python -m distconv run`, asked while Python imports the package."""
    # At that time "-m" is in place of the program in sys.argv.
    as_module = sys.argv[:2] == ["-m", "run"] and ("-m", "distconv") in itertools.pairwise(sys.orig_argv)
    return as_module or (os.path.basename(sys.argv[0]) == "distconv" and sys.argv[1:2] == ["run"])
