"""The name of the backend, and the lock around its calls to MPI."""

from __future__ import annotations

import threading

from mucudnn.process import renewed

BACKEND = "mpi4py"

mpi_lock = renewed(threading.Lock())
"""MPI may be callable by one thread at a time only, and autograd calls from its own threads.

Every call under this lock returns at once (issue or test), except where a communicator is made or freed.
"""
