"""The network addresses at which the processes of a job listen.

If all are on one machine, no other machine can reach them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

LOOPBACK = "127.0.0.1"

INTERFACE_VARIABLES = (
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"),
    *("UCX_NET_DEVICES", "FI_TCP_IFACE", "FI_SOCKETS_IFACE"),  # UCX and libfabric, beneath MPICH
    *("OMPI_MCA_btl_tcp_if_include", "OMPI_MCA_oob_tcp_if_include", "PRTE_MCA_oob_tcp_if_include"),  # Open MPI's
)
"""The environment variables in which communication libraries read the network interface to use."""


def loopback_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep the messages of a job on one machine on its loopback interface.

    A variable that the user has set stays as it is. Empty where the system's loopback interface is not known.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {variable: name for name in names[:1] for variable in INTERFACE_VARIABLES if variable not in environment}


def listening_store(host: str, port: int) -> TCPStore:
    """torch.distributed's key-value store, in this process; port 0: any that is free.

    It listens at the loopback address alone where `host` is one, else at every address of this machine, as torch does.
    Whoever reaches it can read and write it.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if not is_loopback(host):
        return TCPStore(host, port, is_master=True, wait_for_workers=False)
    listener = socket.create_server((LOOPBACK, port), backlog=1024)
    port = listener.getsockname()[1]
    # The store takes the socket over and listens on it.
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means this machine, as seen from nowhere else."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_on_one_machine(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether the launcher says that all ranks of the job are on this machine; where it says nothing, no."""
    for local, size in (
        ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
        ("MPI_LOCALNRANKS", "PMI_SIZE"),
        ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ):
        if local in environment and size in environment:
            return environment[local] == environment[size]
    return False
