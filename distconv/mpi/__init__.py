"""A torch.distributed backend over mpi4py: the process group "mpi4py".

    mpiexec -n 4 python train.py        # train.py calls distconv.mpi.init_process_group()

Every collective is MPI's nonblocking one, on a communicator that belongs to the process group alone. So several may be
in flight, and they run on a communicator in the order in which they were issued. Tensors that MPI cannot address
(strided, or on a device that this MPI does not know) are staged through a contiguous, pinned host copy.
float16 and bfloat16 have no portable MPI type: they travel as bytes, and are reduced in float32 and rounded once.
"""

from __future__ import annotations

import torch.distributed as dist

from distconv.mpi.backend import BACKEND

try:
    from distconv.mpi.group import create
except (ImportError, RuntimeError) as error:  # the latter from mpi4py, where it finds no MPI
    raise ImportError(
        f"ranks over MPI need mpi4py and an MPI library: {' '.join(str(error).split())}; accepted: another backend, or"
        " pip install mpi4py mpich"
    ) from None
from distconv.mpi.start import init_process_group

__all__ = ["BACKEND", "init_process_group"]

dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
