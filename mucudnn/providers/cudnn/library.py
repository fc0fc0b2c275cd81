"""The functions of libcudnn 9 through ctypes, and the meaning of its errors."""

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import POINTER, byref, c_char_p, c_int, c_int64, c_size_t, c_void_p
from functools import cache
from typing import Any

import torch

SONAME = "libcudnn.so.9"

MAJOR = 9  # The major version whose enums and structures are written down here.

LEAST = 91900  # The first version that has been read: 9.19, which torch 2.11 carries.


class CudnnError(RuntimeError):
    """A call of cuDNN that failed; the message is one line with cuDNN's own last words.

    Attributes:
        what: the call.
        status: cudnnStatus_t; 0 where the call was not even made.
        said: cuDNN's words.
    """

    def __init__(self, what: str, status: int, said: str) -> None:
        super().__init__(f"{what}: cuDNN status {status}: {said}")
        self.what, self.status, self.said = what, status, said

    @property
    def is_lasting(self) -> bool:
        """Whether the same call fails always: cuDNN does not serve it, rather than having run out of something."""
        return self.status == 0 or 2000 <= self.status < 4000


class Unavailable(RuntimeError):
    """cuDNN cannot be used in this process; the message is a sentence that says why."""


_INTS = POINTER(c_int)
_DESCRIPTORS = (c_void_p,) * 4
_ALPHA_BETA = c_void_p
_OPERATIONS = ("Forward", "BackwardData", "BackwardFilter")

_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cudnnCreate": (POINTER(c_void_p),),
    "cudnnSetStream": (c_void_p, c_void_p),
    "cudnnBackendCreateDescriptor": (c_int, POINTER(c_void_p)),
    "cudnnBackendDestroyDescriptor": (c_void_p,),
    "cudnnBackendFinalize": (c_void_p,),
    "cudnnBackendSetAttribute": (c_void_p, c_int, c_int, c_int64, c_void_p),
    "cudnnBackendGetAttribute": (c_void_p, c_int, c_int, c_int64, POINTER(c_int64), c_void_p),
    "cudnnBackendExecute": (c_void_p, c_void_p, c_void_p),
    "cudnnCreateTensorDescriptor": (POINTER(c_void_p),),
    "cudnnDestroyTensorDescriptor": (c_void_p,),
    "cudnnSetTensorNdDescriptor": (c_void_p, c_int, c_int, _INTS, _INTS),
    "cudnnCreateFilterDescriptor": (POINTER(c_void_p),),
    "cudnnDestroyFilterDescriptor": (c_void_p,),
    "cudnnSetFilterNdDescriptor": (c_void_p, c_int, c_int, c_int, _INTS),
    "cudnnCreateConvolutionDescriptor": (POINTER(c_void_p),),
    "cudnnDestroyConvolutionDescriptor": (c_void_p,),
    "cudnnSetConvolutionNdDescriptor": (c_void_p, c_int, _INTS, _INTS, _INTS, c_int, c_int),
    "cudnnSetConvolutionGroupCount": (c_void_p, c_int),
    "cudnnGetConvolutionGroupCount": (c_void_p, _INTS),
    "cudnnSetConvolutionMathType": (c_void_p, c_int),
    "cudnnGetConvolutionMathType": (c_void_p, _INTS),
    "cudnnGetConvolutionNdForwardOutputDim": (c_void_p, c_void_p, c_void_p, c_int, _INTS),
}
for _operation in _OPERATIONS:
    # Two tensors to read, the convolution, the tensor to write.
    _SIGNATURES[f"cudnnGetConvolution{_operation}WorkspaceSize"] = (c_void_p, *_DESCRIPTORS, c_int, POINTER(c_size_t))
    # Handle, alpha, two tensors to read, convolution, algorithm, workspace and its bytes, beta, the tensor to write.
    _SIGNATURES[f"cudnnConvolution{_operation}"] = (
        *(c_void_p, _ALPHA_BETA, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p, c_size_t),
        *(_ALPHA_BETA, c_void_p, c_void_p),
    )


class Library:
    """The functions of one loaded libcudnn, by their own names, with the types of their arguments set."""

    def __init__(self, loaded: ctypes.CDLL, path: str) -> None:
        """
        Raises:
            Unavailable: for another major version, one older than `LEAST`, or one that lacks a function.
        """
        self.path = path  # The path of the file, as the loader knows it.
        loaded.cudnnGetVersion.restype = c_size_t
        self.version = int(loaded.cudnnGetVersion())  # 92000 is 9.20.0.
        if self.version // 10000 != MAJOR or self.version < LEAST:
            raise Unavailable(
                f"{path} is cuDNN {spelled(self.version)}: {spelled(LEAST)} and later of cuDNN {MAJOR} are known"
            )
        try:
            for name, types in _SIGNATURES.items():
                function = getattr(loaded, name)
                function.argtypes, function.restype = types, c_int
                setattr(self, name, function)
            loaded.cudnnGetLastErrorString.argtypes = c_char_p, c_size_t
            loaded.cudnnGetLastErrorString.restype = None
        except AttributeError as error:
            raise Unavailable(f"{path}, cuDNN {spelled(self.version)}, lacks a function: {error}") from error
        self._last_error = loaded.cudnnGetLastErrorString

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is no function of cuDNN that is used here")

    def check(self, status: int, what: str) -> None:
        """
        Raises:
            CudnnError: for a status other than success.
        """
        if status:
            text = ctypes.create_string_buffer(1024)
            self._last_error(text, len(text))
            said = " ".join(text.value.decode(errors="replace").split())
            raise CudnnError(what, status, said or "no message")

    def created(self, create: str) -> c_void_p:
        """The new object that cuDNN's function `create` gives."""
        made = c_void_p()
        self.check(getattr(self, create)(byref(made)), create)
        return made


def spelled(version: int) -> str:
    """92000 as "9.20.0"."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@cache
def library() -> Library:
    """The libcudnn that torch has loaded.

    Raises:
        Unavailable: where there is none, or none that can be used beside torch.
    """
    if not torch.backends.cudnn.is_available():
        raise Unavailable(f"torch {torch.__version__} is built without cuDNN")
    if not sys.platform.startswith("linux"):
        raise Unavailable(f"cuDNN is looked for on Linux only, not on {sys.platform}")
    files = loaded_files()
    if len(files) > 1:
        raise Unavailable(f"{len(files)} copies of cuDNN are loaded, whose parts would mix: {', '.join(files)}")
    try:
        # By its name, and only if it is there already: a second copy would mix with torch's.
        loaded = ctypes.CDLL(SONAME, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError as error:
        raise Unavailable(f"torch has not loaded {SONAME}: {error}") from error
    found = Library(loaded, files[0] if files else SONAME)
    torchs = torch.backends.cudnn.version()
    if torchs != found.version:
        raise Unavailable(f"{found.path} is cuDNN {spelled(found.version)}, torch reports {torchs}")
    return found


def loaded_files() -> list[str]:
    """The files of libcudnn itself, not of its parts, that this process has mapped."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[5].strip() for line in maps if SONAME in line}
    except (OSError, IndexError):
        return []
    return sorted(path for path in paths if os.path.basename(path).startswith(SONAME))
