"""The processes that benchmarks/distributed/distributed.py asks to measure."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.process import Process

HERE = Path(__file__).resolve().parent


class RankProcesses(Process):
    """Ranks over "gloo" or "mpi"."""

    def __init__(self, transport: str, ranks: int) -> None:
        program = [sys.executable, str(HERE / "rank.py"), transport]
        self._directory = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        if transport == "mpi":
            from distconv.job.launcher import mpiexec

            commands = [[*mpiexec(ranks), *program]]
        else:
            store = str(Path(self._directory.name, "store"))
            commands = [[*program, str(rank), str(ranks), store] for rank in range(ranks)]
        super().__init__(f"{ranks} ranks over {transport}", commands, GLOO_SOCKET_IFNAME="lo")

    def close(self) -> None:
        super().close()
        self._directory.cleanup()


class JaxProcess(Process):
    """JAX on so many host devices of one thread each."""

    def __init__(self, python: str, devices: int) -> None:
        flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
        self.version = ""
        command = [python, str(HERE / "jax_rank.py")]
        super().__init__(f"JAX on {devices} devices", [command], XLA_FLAGS=flags, JAX_PLATFORMS="cpu")

    def ask(self, **request: Any) -> Any:
        answer = super().ask(**request)
        if request["do"] == "prepare":
            self.version = answer["version"]
        return answer
