"""Environment: what beside the problem changes a convolution's time."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from mucudnn.version import VERSION


@dataclass(frozen=True)
class Environment:
    """The machine, the libraries and the switches under which a launch is timed.

    Attributes:
        device: the device's type and name.
        threads: intra-operator threads of the host; 0 where they have no part in it.
        deterministic: whether only deterministic algorithms may run.
        precision: the switches that let a backend compute in a narrower type, as text.
        libraries: versions of what runs the launches, as text.
    """

    device: str
    threads: int
    deterministic: bool
    precision: str
    libraries: str

    @classmethod
    def current(cls, device: torch.device) -> Environment:
        """The environment of a call on `device` now."""
        is_cuda = device.type == "cuda"
        deterministic = torch.are_deterministic_algorithms_enabled()
        versions = f"mucudnn {VERSION}, torch {torch.__version__}"
        return cls(
            device=_device_name(device.type, device.index),
            threads=0 if is_cuda else torch.get_num_threads(),
            deterministic=deterministic or (is_cuda and torch._C._get_cudnn_deterministic()),
            precision=_precision(device.type),
            libraries=f"{versions}, cuDNN {torch.backends.cudnn.version()}" if is_cuda else versions,
        )

    def launch_key(self) -> dict[str, Any]:
        """Plain values for a database."""
        return asdict(self)


def switches(device_type: str = "cpu") -> tuple[object, ...]:
    """What of the environment a program may change between two calls; reading it takes a fraction of a microsecond."""
    if device_type == "cuda":
        return (
            torch._C._get_deterministic_algorithms(),
            torch._C._get_cudnn_enabled(),
            torch._C._get_cudnn_deterministic(),
            torch._C._get_cudnn_benchmark(),
            torch._C._get_fp32_precision_getter("cuda", "conv"),
        )
    return (
        torch.get_num_threads(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_fp32_precision_getter("mkldnn", "conv"),
    )


def _precision(device_type: str) -> str:
    if device_type == "cuda":
        # Whether torch measures its own choice of kernel is no precision, but as much a switch of its time.
        benchmark = "on" if torch._C._get_cudnn_benchmark() else "off"
        return f"fp32={torch._C._get_fp32_precision_getter('cuda', 'conv')} benchmark={benchmark}"
    enabled = torch._C._get_mkldnn_enabled()
    return f"mkldnn={'on' if enabled else 'off'} fp32={torch._C._get_fp32_precision_getter('mkldnn', 'conv')}"


@cache
def memory(device: torch.device) -> int:
    """Physical memory of a device, or of the host, in bytes."""
    if device.type == "cuda":
        total: int = torch.cuda.get_device_properties(device).total_memory
        return total
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@cache
def _device_name(device_type: str, index: int | None) -> str:
    if device_type == "cpu":
        return f"cpu {_processor()}"
    return f"{device_type} {torch.get_device_module(device_type).get_device_name(index)}"


def _processor() -> str:
    """The processor's model; Python's own answer is empty on Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
