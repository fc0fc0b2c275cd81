"""Runs scripts one after another, each in a folder of its own name: `python together.py NAME...`.

One process imports torch once for all of them. What stops a script is printed, and the next one
runs.
"""

import contextlib
import os
import random
import runpy
import sys
import traceback
from pathlib import Path

import numpy
import torch

SCRIPTS = Path(__file__).with_name("scripts")
STARTS, FAILED = "== ", "failed: "

sys.path.insert(0, str(SCRIPTS))
for name in sys.argv[1:]:
    print(f"{STARTS}{name}", flush=True)
    for draw in (torch.manual_seed, numpy.random.seed, random.seed):
        draw(0)
    torch.set_default_dtype(torch.float32)
    os.mkdir(name)
    with contextlib.chdir(name):
        try:
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        except Exception as error:
            print(f"{FAILED}{type(error).__name__}: {error}", flush=True)
            traceback.print_exc()
