"""Adds up over all ranks until one of them, or all, end as the first argument says. Runs with --show-ranks."""

import atexit
import multiprocessing
import os
import signal
import sys
import time

import torch
import torch.distributed as dist


def fail() -> None:
    if dist.get_rank() == 0:
        time.sleep(0.3)  # ranks do not fail at one moment
    raise RuntimeError("no luck")


ENDS = {
    "fail": fail,
    "exit": lambda: sys.exit(7),
    "early": lambda: sys.exit(0),
    "leave": lambda: os._exit(0),
    "crash": lambda: (os.write(2, b"written beneath Python\n"), os.abort()),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stay": lambda: None,
}

if __name__ == "__main__":
    how, *options = sys.argv[1:]
    if "--child" in options:  # as a DataLoader's worker is
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True).start()
    atexit.register(print, "left", flush=True)
    total = torch.ones(2)
    dist.all_reduce(total)  # all ranks are here
    print("started", flush=True)
    for step in range(100_000):
        if step == 3 and ("--all" in options or dist.get_rank() == 1):
            ENDS[how]()
        dist.all_reduce(total)
        time.sleep(0.01)
