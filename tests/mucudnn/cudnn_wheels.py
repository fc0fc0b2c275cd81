"""What plans for a GPU that is not there need: libcudnn from the wheels, and the properties of the GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from mucudnn.providers.cudnn.library import SONAME, Library, Unavailable

_DRIVER_CALLS = (
    *("cuCtxGetCurrent", "cuCtxGetLimit", "cuCtxPopCurrent", "cuCtxPushCurrent", "cuDeviceGet", "cuDeviceGetCount"),
    *("cuDriverGetVersion", "cuGetErrorName", "cuKernelGetAttribute", "cuKernelGetFunction", "cuKernelSetAttribute"),
    *("cuLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchKernelEx", "cuLibraryGetKernel", "cuLibraryLoadData"),
    *("cuLibraryLoadFromFile", "cuLibraryUnload", "cuLinkAddData", "cuLinkComplete", "cuLinkCreate", "cuLinkDestroy"),
    *("cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload", "cuOccupancyMaxPotentialClusterSize"),
    *("cuStreamGetCtx", "cuTensorMapEncodeIm2col", "cuTensorMapEncodeTiled"),
)
"""What cuDNN looks up in libcuda; planning for a device that is not there does with their refusal."""

_NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""

H200: dict[str, Any] = {
    "cudaDeviceId": 0,
    "deviceName": "NVIDIA H200",
    "deviceVer": 900,
    "driverVer": 13000,
    "isTccDriver": 0,
    "l2CacheSize": 62914560,
    "maxBlockSize": [1024, 1024, 64],
    "maxCtasPerSM": 32,
    "maxGridSize": [2147483647, 65535, 65535],
    "maxRegistersPerSM": 65536,
    "maxSharedMemoryPerBlock": 49152,
    "maxSharedMemoryPerBlockOptin": 232448,
    "maxThreadsPerBlock": 1024,
    "maxThreadsPerSM": 2048,
    "memClockRateKHz": 3201000,
    "memoryBusWidth": 6144,
    "multiProcessorCount": 132,
    "oversizedSharedMemoryPerBlock": 0,
    "pciDeviceId": 0x2335,
    "regsPerBlock": 65536,
    "reservedSharedMemoryPerBlock": 1024,
    "smClockRateKHz": 1980000,
    "supportCoopLaunch": 1,
    "totalGlobalMem": 150754820096,
    "warpSize": 32,
}
"""An H200's properties from its data sheet and from what CUDA reports of it; not read from a card through cuDNN."""


def opened(path: str, needs: Sequence[str] = ()) -> Library:
    """A libcudnn by its path, after the libraries that it needs.

    Raises:
        Unavailable: where it cannot be loaded.
    """
    try:
        for needed in needs:
            ctypes.CDLL(needed, mode=ctypes.RTLD_GLOBAL)
        return Library(ctypes.CDLL(path), path)
    except OSError as error:
        raise Unavailable(f"{path} cannot be loaded: {error}") from error


@cache
def wheel_library(folder: Path) -> Library:
    """The libcudnn of the wheels nvidia-cudnn, nvidia-cublas and nvidia-cuda-nvrtc.

    To finalize a plan takes these libraries and no device. A libcuda that refuses everything is compiled into the
    folder.

    Raises:
        Unavailable: where a wheel or the C compiler is missing.
    """
    try:
        spec = importlib.util.find_spec("nvidia")
    except ModuleNotFoundError:
        spec = None
    roots = [Path(place) for place in (spec.submodule_search_locations or ())] if spec is not None else []
    needs = [_stub(folder)]
    for name in ("libnvrtc.so.1[0-9]", "libcublasLt.so.1[0-9]", "libcublas.so.1[0-9]", SONAME):
        found = sorted(path for root in roots for path in root.glob(f"*/lib/{name}"))
        if not found:
            raise Unavailable(f"{name} is not installed: pip install 'mucudnn-distconv[cudnn-test]' brings it")
        needs.append(found[-1])
    return opened(str(needs[-1]), [str(path) for path in needs[:-1]])


def _stub(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise Unavailable("no C compiler is installed to build the libcuda that stands in for the driver")
    source, made = folder / "libcuda.c", folder / "libcuda.so.1"
    lines = [f"int {name}(void) {{ return {_NO_DEVICE}; }}" for name in _DRIVER_CALLS]
    lines.append('int cuGetErrorString(int error, const char **text) { *text = "no device"; return 0; }')
    source.write_text("\n".join(lines) + "\n")
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(made), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return made
