"""Loads libcudnn from the wheels, to plan without a GPU: finalizing a plan takes five libraries and no device."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from functools import cache
from pathlib import Path

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


@cache
def wheel_library(folder: Path) -> Library:
    """The libcudnn of the wheels nvidia-cudnn, nvidia-cublas and nvidia-cuda-nvrtc.

    A libcuda that refuses everything is compiled into the folder.

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
    return Library.opened(str(needs[-1]), [str(path) for path in needs[:-1]])


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
