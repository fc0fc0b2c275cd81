"""Steps until a signal tells to stop, then prints after how many. Runs with --show-ranks."""

import signal
import sys
import time

import torch
import torch.distributed as dist

stop = []
if sys.argv[1] == "flag":
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
        if step == 20 and dist.get_rank() == 0:
            print("started", flush=True)
except KeyboardInterrupt:
    print("interrupted")
print("after", step)
sys.exit(5)
