"""A figure of torch alone, under the environment of this process: asked by benchmarks/gpu/contact_program.py.

CUDNN_CONV_WSCAP_DBG=8 python benchmarks/gpu/contact_alone.py workspace cuda:0
NCCL_LAUNCH_ORDER_IMPLICIT=1 python benchmarks/gpu/contact_alone.py nccl cuda:0
"""

from __future__ import annotations

import sys
import time

import torch
import torch.distributed as dist
from torch.nn.functional import conv2d


def torchs_workspace(device: torch.device) -> float:
    """MiB that torch takes at its peak for AlexNet's second convolution, its search for the fastest kernel included."""
    torch.backends.cudnn.benchmark = True
    x, w = torch.randn(64, 64, 27, 27, device=device), torch.randn(192, 64, 5, 5, device=device)
    conv2d(x[:1], w, padding=2)  # what CUDA itself sets up
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    result = conv2d(x, w, padding=2)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before - result.nbytes) / 2**20


def two_communicators(device: torch.device) -> float:
    """Microseconds of an allreduce, two communicators in turn."""
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.new_group([0]), dist.new_group([0])]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    tensors = [torch.ones(1024, device=device) for _ in groups]

    def both() -> None:
        for group, stream, tensor in zip(groups, streams, tensors, strict=True):
            with torch.cuda.stream(stream):
                dist.all_reduce(tensor, group=group)

    both()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(100):
        both()
    torch.cuda.synchronize(device)
    took = 1e6 * (time.perf_counter() - began) / 200
    dist.destroy_process_group()
    return took


if __name__ == "__main__":
    what, where = sys.argv[1], torch.device(sys.argv[2])
    print({"workspace": torchs_workspace, "nccl": two_communicators}[what](where))
