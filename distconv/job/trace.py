"""A timeline of all ranks in one file for Perfetto and Chrome: torch's profiles of every rank, merged."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity

from distconv.job.summary import at_good_end
from distconv.transfer.account import ACCOUNT
from mucudnn.process.substitution import environment

STEPS = 10  # The number of recorded optimizer steps; a program without any is recorded as a whole.


@contextlib.contextmanager
def traced(path: str | None) -> Iterator[None]:
    """A context that records a script; at its end, unless it fails, the first rank writes the records of all ranks.

    Args:
        path: of the file; None records nothing.
    """
    if path is None:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    # Without acc_events, torch 2.12 warns of more cycles than the one that there is.
    recording = _Recording(torch.profiler.profile(activities=activities, acc_events=True))
    hook = register_optimizer_step_post_hook(recording.stepped)
    try:
        with at_good_end(lambda: _write(path, recording.events())):
            yield
    finally:
        hook.remove()
        recording.stop()


class _Recording:
    def __init__(self, profile: torch.profiler.profile) -> None:
        self._profile, self._steps, self._is_on = profile, 0, True
        ACCOUNT.is_traced = True
        with environment(KINETO_LOG_LEVEL="99"):  # else the library beneath prints on stderr that it starts
            profile.start()

    def stepped(self, *_: object) -> None:
        """An optimizer has stepped."""
        self._steps += 1
        if self._steps == STEPS:
            self.stop()

    def stop(self) -> None:
        """Ends the recording."""
        if self._is_on:
            self._profile.stop()
            self._is_on = ACCOUNT.is_traced = False

    def events(self) -> dict[str, Any]:
        """The recorded events, as torch writes them, when the recording has ended."""
        self.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "trace.json")
            self._profile.export_chrome_trace(path)
            with open(path) as file:
                found: dict[str, Any] = json.load(file)
            return found


def _write(path: str, own: dict[str, Any]) -> None:
    """Collective over all ranks."""
    packed = zlib.compress(json.dumps({**own, "process": os.getpid()}).encode())
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(packed, everyone)
    if everyone is not None:
        with open(path, "w") as file:
            json.dump(merged_trace([json.loads(zlib.decompress(each)) for each in everyone]), file)


def merged_trace(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The recordings of all ranks as one, with a process for each rank, and one for each of its GPUs.

    Args:
        ranks: what torch writes on each, and beside it the number of its process.
    """
    begin = int(ranks[0].get("baseTimeNanoseconds", 0))
    events: list[dict[str, Any]] = []
    for rank, found in enumerate(ranks):
        later = (int(found.get("baseTimeNanoseconds", 0)) - begin) / 1000  # microseconds
        names: dict[int, str] = {}
        for event in found["traceEvents"]:
            process = event.get("pid")
            if event.get("ph") == "M" or not isinstance(process, int):
                continue  # torch's own names of processes, and what spans all of them
            is_host = process == found["process"]
            place = 1000 * rank + (0 if is_host else 1 + process)
            names[place] = f"rank {rank}" if is_host else f"rank {rank}, GPU {process}"
            moved = {"ts": event["ts"] + later} if "ts" in event else {}
            flow = {"id": f"{rank}/{event['id']}"} if "id" in event else {}
            events.append({**event, "pid": place, **moved, **flow})
        for place, name in names.items():
            events.append({"ph": "M", "name": "process_name", "pid": place, "args": {"name": name}})
            events.append({"ph": "M", "name": "process_sort_index", "pid": place, "args": {"sort_index": place}})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
