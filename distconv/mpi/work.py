"""Operations in flight: the work objects that torch waits for, and the thread that drives them meanwhile."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from distconv.mpi.backend import mpi_lock
from mucudnn.process import renewed

PROGRESS_SECONDS = 2e-4  # between two looks of the progress thread at what is in flight


class MPIWork(dist.Work):
    """Requests in flight, what to do when they complete, and the buffers that must live until then.

    members: the ranks of the job that take part; one that has ended makes `wait` fail.
    """

    def __init__(
        self,
        requests: list[MPI.Request],
        outputs: list[Tensor],
        keep: Sequence[Tensor],
        finish: Sequence[Callable[[], None] | None],
        timeout: timedelta,
        members: Collection[int] = (),
    ) -> None:
        super().__init__()
        self._requests, self._outputs, self._keep = requests, outputs, keep
        # What the caller has enqueued until now may still read or write the outputs when the requests are complete.
        self._issued = {
            device: torch.cuda.current_stream(device).record_event()
            for device in {output.device for output in outputs if output.is_cuda}
        }
        self._finish = [step for step in finish if step is not None]
        self._timeout, self._members = timeout, members
        self._lock = renewed(threading.RLock())
        self._done = False
        self._error: BaseException | None = None
        self._future: torch.futures.Future[list[Tensor]] | None = None
        self._status = MPI.Status()

    def poll(self) -> bool:
        """Drives the requests; True when they are complete and the results are in place."""
        with self._lock:
            if self._done:
                return True
            try:
                with mpi_lock:
                    while self._requests:
                        if not self._requests[-1].Test(self._status):
                            return False
                        self._requests.pop()
                if self._finish:
                    self._put_in_place()
            except BaseException as error:
                self._error = error
            self._done, self._keep, self._finish = True, (), []
            if self._future is not None:
                self._resolve(self._future)
            return True

    def _put_in_place(self) -> None:
        for device, issued in self._issued.items():
            torch.cuda.current_stream(device).wait_event(issued)  # that of whichever thread has found it complete
        inference = any(output.is_inference() for output in self._outputs)
        with torch.inference_mode() if inference else torch.no_grad():
            for step in self._finish:
                step()
        for device in self._issued:
            torch.cuda.current_stream(device).synchronize()  # another thread's stream may use the result next

    def wait(self, timeout: timedelta | None = None) -> bool:
        limit = (timeout or self._timeout).total_seconds()
        tries, begin = 0, 0.0
        absence = None
        while not self.poll():
            tries += 1
            if tries < 200:  # yield first: ranks may share a core with the one they wait for
                os.sched_yield()
                continue
            now = time.monotonic()
            begin = begin or now
            absence = absence or AbsentRanks(self._members)
            try:
                absence.check(now)
                if now - begin > limit:
                    raise dist.DistBackendError(f"an MPI operation did not complete within {limit:g} s")
            except dist.DistBackendError:
                progress.abandoned.append(self)  # MPI may still write to its buffers
                raise
            time.sleep(min(2e-4, 1e-5 + (now - begin) / 50))
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        with self._lock:
            if self._future is None:
                devices = {tensor.device for tensor in self._outputs if tensor.is_cuda}
                self._future = torch.futures.Future(devices=[*devices])
                if self._done:
                    self._resolve(self._future)
                else:
                    progress.drive(self)
            return self._future

    def _resolve(self, future: torch.futures.Future[list[Tensor]]) -> None:
        if isinstance(self._error, Exception):
            future.set_exception(self._error)  # type: ignore[arg-type]
        else:
            future.set_result(self._outputs)

    def is_completed(self) -> bool:
        return self.poll()

    def is_success(self) -> bool:
        return self.poll() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def result(self) -> list[Tensor]:
        return self._outputs

    def synchronize(self) -> None:
        self.wait()

    def _source_rank(self) -> int:
        return int(self._status.source)

    source_rank = _source_rank


class Progress:
    """A thread that drives works whose owner computes meanwhile: MPI moves large messages only when it is called."""

    def __init__(self) -> None:
        self.abandoned: list[MPIWork] = []
        self._works: list[MPIWork] = []
        self._changed = renewed(threading.Condition())
        self._thread: threading.Thread | None = None
        self._stopping = False

    def drive(self, work: MPIWork) -> None:
        with self._changed:
            self._works.append(work)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpi-progress", daemon=True)
                self._thread.start()
                atexit.register(self._stop)
            elif len(self._works) == 1:
                self._changed.notify()

    def finish(self) -> None:
        """Waits for everything in flight."""
        with self._changed:
            works = list(self._works)
        for work in works:
            work.wait()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._works and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                works = list(self._works)
            done = {id(work) for work in works if work.poll()}
            with self._changed:
                self._works = [work for work in self._works if id(work) not in done]
            time.sleep(PROGRESS_SECONDS)

    def _stop(self) -> None:
        """Before MPI is finalised."""
        self.finish()
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()


progress = Progress()


WAIT_SECONDS = 5.0  # how long an operation may still take after one of its ranks has ended
_LOOK_SECONDS = 1.0

_ended: list[Callable[[], Collection[int]]] = []


def ask_for_ended(ended: Callable[[], Collection[int]]) -> None:
    """Makes `ended` report the ranks of the job that have ended, from now on."""
    _ended[:] = [ended]


class AbsentRanks:
    """Watches over one operation that takes long."""

    def __init__(self, members: Collection[int]) -> None:
        self._members = members
        self._since: float | None = None
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def check(self, now: float) -> None:
        """DistBackendError if one of the members ended WAIT_SECONDS ago or earlier; `now` is time.monotonic()."""
        if not _ended or now < self._look_at:
            return
        self._look_at = now + _LOOK_SECONDS
        gone = sorted(set(self._members).intersection(_ended[0]()))
        if not gone:
            return
        self._since = self._since or now
        if now - self._since > WAIT_SECONDS:
            raise dist.DistBackendError(f"an MPI operation waits for rank {gone[0]}, which has ended")
