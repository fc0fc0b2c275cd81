"""Prints its arguments, then ends as the first of them says."""

import os
import sys
import time

import torch.distributed as dist


def fail() -> None:
    raise RuntimeError("no luck")


how, *others = sys.argv[1:]
print("hello", __name__, others, flush=True)
rank = dist.get_rank() if dist.is_initialized() else 0
if how == "fail":
    fail()
elif how == "exit":
    sys.exit(7)
elif rank == 1:
    if how == "fail-one":
        fail()
    elif how == "exit-one":
        sys.exit(7)
    elif how == "crash-one":
        os.abort()
elif how.endswith("-one"):
    time.sleep(600)  # as one waits for a rank that is gone
print("end")
