"""All ranks of the MPI job. A running script sees less: mpi4py's COMM_WORLD is there this rank alone."""

from __future__ import annotations

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
