"""Starts the ranks of a job on this machine, and checks before whether the job can run."""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from distconv import private_names, settings
from distconv.files.job_folder import FOLDER_VARIABLE, job_folder
from distconv.job.hash_seed import drawn_seed
from distconv.job.supervisor import Watcher, accompany, part_into_ranks, supervise_launcher
from distconv.model.strategy import Strategy
from distconv.place import MPI_VARIABLES
from distconv.place.addresses import LOOPBACK, loopback_variables
from distconv.settings.partition import Partition, shards_data
from mucudnn.commands.arguments import check_writable
from mucudnn.lazily import uncollected
from mucudnn.settings import SETTINGS, Settings


class BadInput(ValueError):
    """The user's arguments cannot be run; the message is one line."""


@dataclass(frozen=True)
class Job:
    """A script and how to run it."""

    partition: Partition | None  # None: the ranks choose it when all are connected
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    backend: str | None = None
    shard_data: bool = False
    batch_norm: str = "global"
    strategy: Strategy | None = None
    print_all_ranks: bool = False
    report: str | None = None  # a file for what mucudnn chose on rank 0
    show_ranks: bool = False
    summary: bool | None = None  # None: where the first rank's stderr is a terminal
    parts: Partition | None = None  # that each rank computes in turn
    memory: int | None = None  # the most bytes of a rank's parts on its device
    fitting: str | None = None  # the most bytes of all of a rank's tensors on its device, or "auto"


def check_job(job: Job, size: int | None, backend: str | None) -> None:
    """Whether `job` can run on `size` ranks over `backend`; None means one that the ranks choose.

    Raises:
        BadInput, NotFound, SettingError: one line, where it cannot.
    """
    if job.partition is not None and size is not None and job.partition.ranks != size:
        ranks = f"{size} rank" + "s" * (size != 1)
        raise BadInput(f"partition {str(job.partition)!r} needs {job.partition.ranks} ranks, but there are {ranks}")
    if job.shard_data and job.partition is not None and not shards_data(job.partition.names):
        raise BadInput(f"--shard-data needs an axis sample or one of space, which {str(job.partition)!r} lacks")
    if not job.shard_data and settings.value("store") is not None:
        raise BadInput("--store keeps the data that each rank reads by itself: it needs --shard-data")
    if job.module:
        try:
            found = importlib.util.find_spec(job.script) is not None
        except (ImportError, ValueError):
            found = False
        if not found:
            raise BadInput(f"there is no module {job.script!r}")
    elif not os.path.exists(job.script):
        raise BadInput(f"there is no script {job.script!r}")
    if backend == "nccl":
        import torch
        import torch.distributed as dist

        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise BadInput("backend 'nccl' needs a GPU and a torch built with NCCL; accepted here: gloo, mpi")
        devices = torch.cuda.device_count()
        if size is not None and "LOCAL_RANK" not in os.environ and size > devices:
            raise BadInput(
                f"backend 'nccl' needs a GPU per rank, but {size} ranks share {devices}; accepted: gloo, mpi"
            )
    if backend == "mpi" and importlib.util.find_spec("mpi4py") is None:
        raise BadInput("backend 'mpi' needs mpi4py: pip install mpi4py mpich")
    if job.report is not None:
        if not divides_locally():
            raise BadInput("--report writes what mucudnn chose: it needs MUCUDNN_WORKSPACE_LIMIT or another limit")
        check_writable("--report", job.report)
    if divides_locally():
        Settings.from_environment()


def divides_locally() -> bool:
    """Whether mucudnn is to divide each rank's own convolutions: the environment sets a limit for it."""
    names = ("workspace_limit", "memory_limit", "total_workspace_size")
    return any(os.environ.get(SETTINGS[name].variable) for name in names)


def start(job: Job, command: list[str]) -> int:
    """Runs `command`, this process's own, on every rank of `job`; the exit code of the job."""
    assert job.partition is not None, "without a launcher it is chosen before there are ranks"
    size = job.partition.ranks
    check_job(job, size, job.backend)
    environment = dict(os.environ)
    environment["PYTHONHASHSEED"] = drawn_seed(environment)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // size)))
    environment |= loopback_variables(environment)  # all ranks are on this machine
    if job.backend == "mpi":
        for names in MPI_VARIABLES:
            for name in names:
                environment.pop(name, None)
        try:
            program = mpiexec(size)
        except FileNotFoundError as error:
            raise BadInput(str(error)) from None
        with job_folder() as environment[FOLDER_VARIABLE]:
            if (code := supervise_launcher()) is not None:
                return code
            return accompany(subprocess.Popen([*program, *command], env=environment), bound=True)
    environment[_STARTER] = str(os.getpid())
    with job_folder() as environment[FOLDER_VARIABLE]:
        return accompany(subprocess.Popen(command, env=environment), bound=False)


def is_launcher() -> bool:
    """Whether `start` has started this process."""
    return _STARTER in os.environ


def import_for_ranks() -> None:
    """Imports the modules that ranks need, which takes seconds, before this process is forked into ranks and watchers.

    torch's compiler is imported too, as torch does it when an optimizer is made.
    """
    with uncollected():
        private_names.check()
        for name in ("torch._dynamo", "distconv.model.interface", "distconv.job.script"):
            importlib.import_module(name)
    gc.freeze()  # a rank then need not look through what it shares, which would copy it, and take a second at its end


def split_process(job: Job) -> int | Watcher:
    """Parts this process, which `start` has started, in the ranks of `job` and their launcher.

    Returns:
        A Watcher in a rank, whose environment then has its place; in the launcher the exit code of the job.
    """
    if os.getppid() != int(os.environ.pop(_STARTER)):
        return 128 + signal.SIGKILL  # the process that was to watch this one has been killed meanwhile
    assert job.partition is not None, "it was chosen before this process was started"
    size = job.partition.ranks
    # The ranks find each other by a store in this process, as they do at torchrun's agent.
    listener = socket.create_server((LOOPBACK, 0), backlog=size)
    os.environ.update(
        MASTER_ADDR=LOOPBACK,
        MASTER_PORT=str(listener.getsockname()[1]),
        TORCHELASTIC_USE_AGENT_STORE="True",
        WORLD_SIZE=str(size),
        LOCAL_WORLD_SIZE=str(size),
    )
    places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return part_into_ranks(places, job.print_all_ranks, listener)


_STARTER = "DISTCONV_STARTER"  # from `start` to the launcher: the process that watches it


def mpiexec(size: int) -> list[str]:
    """The command that runs what follows it on `size` ranks of this machine. FileNotFoundError without an mpiexec."""
    beside = Path(sys.executable).with_name("mpiexec")
    program = str(beside) if beside.exists() else shutil.which("mpiexec")
    if program is None:
        raise FileNotFoundError("there is no mpiexec: pip install mpich, or put your MPI's on PATH")
    return [program, *_open_mpi_options(program), "-n", str(size)]


@functools.cache
def _open_mpi_options(program: str) -> tuple[str, ...]:
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout
    if "Open MPI" not in version and "OpenRTE" not in version:
        return ()
    as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
    return (*as_root, "--oversubscribe")
