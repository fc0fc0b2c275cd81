"""Steps until a signal tells to stop, then writes down after how many. Runs with --show-ranks."""

import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

how, folder = sys.argv[1:]
stop = []
if how == "flag":
    signal.signal(signal.SIGTERM, lambda number, frame: stop.append(number))
weight = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weight], lr=0.1)
step = 0
try:
    while not stop:
        weight.grad = torch.ones(2)
        dist.all_reduce(weight.grad)
        time.sleep(0.002 * (1 + 3 * dist.get_rank()))  # so that a signal finds the ranks at different places
        optimizer.step()
        step += 1
        if step == 20:
            print("started", flush=True)
except KeyboardInterrupt:
    print("interrupted", flush=True)
finally:
    Path(folder, str(dist.get_rank())).write_text(str(step))
sys.exit(5)
