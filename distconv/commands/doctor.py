"""python -m distconv doctor: shows which backends can carry messages on this machine, and where a job would listen."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from typing import Any

from distconv.job.launcher import mpiexec
from distconv.place.addresses import LOOPBACK, is_loopback, loopback_variables
from mucudnn.commands.arguments import add_json

BRIEF = "show which backends this machine has, and where a job would listen"
DESCRIPTION = """\
Shows which backends can carry messages between ranks on this machine, and at which addresses the processes of a job
listen: for a job that distconv starts itself, and for one that torchrun or mpiexec starts on several machines.
Nothing is started and nothing is sent.
"""
EPILOG = """\
examples:
  python -m distconv doctor
  python -m distconv doctor --json
"""


def add_options(parser: Any) -> None:
    """Adds the options of the command."""
    add_json(parser)


def command(options: Any) -> int:
    """Prints what is found."""
    from mucudnn.commands.output import print_json, show

    found = {"backends": backends(), "listens": listening(os.environ)}
    if options.json:
        print_json(found)
    else:
        show(sys.stdout, *(_table(name, rows) for name, rows in found.items()))
    return 0


def backends() -> dict[str, str]:
    """{backend: the library that it would use, or the reason why it cannot}."""
    import torch
    import torch.distributed as dist

    found = {"gloo": "works" if dist.is_gloo_available() else "torch was built without it"}
    if not dist.is_nccl_available():
        found["nccl"] = "torch was built without it"
    else:
        found["nccl"] = f"{torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "there is no GPU"
    if importlib.util.find_spec("mpi4py") is None:
        found["mpi"] = "there is no mpi4py: pip install mpi4py mpich"
    else:
        try:
            found["mpi"] = " ".join(mpiexec(2)[:1])
        except FileNotFoundError as error:
            found["mpi"] = str(error)
    return found


def listening(environment: Mapping[str, str]) -> dict[str, str]:
    """{who listens: at which addresses}, where variables are as `environment` says."""
    chosen = loopback_variables(environment)

    def where(variable: str) -> str:
        if variable in chosen:
            return f"{chosen[variable]} alone"
        if variable in environment:
            return f"{environment[variable]}, as {variable} says"
        return "the interface that the library chooses: no loopback interface is known here"

    return {
        "distconv run: where ranks connect": f"{LOOPBACK} alone",
        "distconv run: Gloo": where("GLOO_SOCKET_IFNAME"),
        "distconv run: NCCL": where("NCCL_SOCKET_IFNAME"),
        "distconv run --backend mpi: MPICH": where("UCX_NET_DEVICES"),
        "distconv run --backend mpi: Open MPI": where("OMPI_MCA_btl_tcp_if_include"),
        "distconv run --backend mpi: mpiexec's own port": "every address, for as long as the job runs",
        "torchrun, mpiexec: where ranks connect": "every address; under mpiexec on one machine the loopback alone",
        "torchrun, mpiexec: Gloo": _of_gloo(environment),
    }


def _of_gloo(environment: Mapping[str, str]) -> str:
    """The interface that Gloo listens at by default: that of the machine's own name."""
    if "GLOO_SOCKET_IFNAME" in environment:
        return f"{environment['GLOO_SOCKET_IFNAME']}, as GLOO_SOCKET_IFNAME says"
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return f"{LOOPBACK}, since this machine's name, {name}, has no address; else set GLOO_SOCKET_IFNAME"
    alone = ", which no other machine reaches: set GLOO_SOCKET_IFNAME" if is_loopback(address) else ""
    return f"{address}, the address of this machine's name, {name}{alone}"


def _table(name: str, rows: Mapping[str, str]) -> Any:
    from rich.table import Table

    table = Table(name, "", show_header=True)
    for what, value in rows.items():
        table.add_row(what, value)
    return table
