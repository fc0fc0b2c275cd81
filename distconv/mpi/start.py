"""Starts torch.distributed among the ranks of an MPI job."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from mpi4py import MPI
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from distconv.mpi.backend import BACKEND
from distconv.mpi.world import WORLD
from distconv.place.addresses import LOOPBACK, listening_store


def init_process_group(
    timeout: timedelta | None = None, backend: str = BACKEND, store_port: int | None = None
) -> Store:
    """torch.distributed.init_process_group over MPI.COMM_WORLD; rank, size and store come from MPI itself.

    store_port: on rank 0, the port of a TCPStore in another process of its machine; None: rank 0 makes one.

    With another `backend` ("gloo", "nccl"), MPI only connects the ranks. Returns the store.
    From then on an uncaught exception on one rank ends all ranks, which would wait for it forever otherwise.
    """
    if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        raise RuntimeError(f"{BACKEND}: this MPI was initialised for one thread; autograd calls it from its own")
    world = WORLD
    if world.size > 1:
        sys.excepthook = _abort_after(sys.excepthook)
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    store = _store(world, store_port)
    dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, **options)
    return store


def _abort_after(report: Callable[..., Any]) -> Callable[..., None]:
    def hook(*exception: Any) -> None:
        report(*exception)
        sys.stdout.flush()
        sys.stderr.flush()
        WORLD.Abort(1)

    return hook


def _store(world: MPI.Intracomm, port_there: int | None) -> Store:
    if world.size == 1:
        return HashStore()
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    host = LOOPBACK if node.size == world.size else world.bcast(socket.gethostname())
    node.Free()
    server = None
    if world.rank == 0 and port_there is None:
        server = listening_store(host, 0)
    port = world.bcast(server.port if server is not None else port_there)
    return server or TCPStore(host, port, is_master=False, wait_for_workers=False)
