"""The processes that benchmarks/distributed/distributed.py asks to measure."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

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
