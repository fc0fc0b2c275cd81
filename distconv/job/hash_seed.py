"""Gives all ranks of a job the same seed of string hashes, so that sets of strings have the same order.

Python reads PYTHONHASHSEED once, when it starts. `distconv run` sets it for the ranks that it starts itself. A rank
that mpiexec or torchrun has started without it restarts itself once, before it imports anything large.
"""

from __future__ import annotations

import os
import secrets
import sys
import zlib
from collections.abc import Mapping

from distconv.place import find_place, is_run

VARIABLE = "PYTHONHASHSEED"

_SHARED = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "PMIX_NAMESPACE",
    "OMPI_MCA_ess_base_jobid",
)
"""Variables that launchers set to the same value on all ranks of a job; some of them differ between jobs."""


def is_fixed(environment: Mapping[str, str]) -> bool:
    """Whether the environment gives a seed; Python takes the word "random" for none."""
    return environment.get(VARIABLE, "random") != "random"


def drawn_seed(environment: Mapping[str, str]) -> str:
    """The user's own seed, or a new one."""
    return environment[VARIABLE] if is_fixed(environment) else str(secrets.randbelow(1 << 32))


def common_seed(environment: Mapping[str, str]) -> str:
    """The user's own seed, or one that is equal on all ranks of the job: "0" if nothing names the job."""
    if is_fixed(environment):
        return environment[VARIABLE]
    settings = [f"{name}={environment[name]}" for name in _SHARED if name in environment]
    return str(zlib.crc32("\n".join(settings).encode())) if settings else "0"


def settle_seed() -> None:
    """Starts this rank anew with the job's seed, where it runs `distconv run` and has none yet."""
    if is_run() and not is_fixed(os.environ) and find_place(os.environ) is not None:
        os.environ[VARIABLE] = common_seed(os.environ)
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
