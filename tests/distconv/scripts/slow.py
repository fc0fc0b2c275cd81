"""Adds up over all ranks, of which the last comes late to the third sum. Runs with --show-ranks."""

import sys
import time

import torch
import torch.distributed as dist

total = torch.ones(2)
for step in range(5):
    if step == 2 and dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(float(sys.argv[1]))
    dist.all_reduce(total)
print("done", flush=True)
