"""Prints its arguments, then ends as the first of them says."""

import os
import sys
import time

import distconv


def fail() -> None:
    raise RuntimeError("no luck")


how, *others = sys.argv[1:]
print("hello", __name__, others, flush=True)
rank = 0 if distconv.is_first() else 1
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
