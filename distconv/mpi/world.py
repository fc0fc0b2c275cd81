"""All ranks of the MPI job, whatever a script is told: while one runs, mpi4py's COMM_WORLD is the rank alone."""

from __future__ import annotations

from mpi4py import MPI

WORLD = MPI.COMM_WORLD
