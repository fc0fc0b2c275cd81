"""Errors about files that cannot be read: one line with the file, the key and the sample."""

from __future__ import annotations

import contextlib
import os
import traceback

_NOTED = "_distconv_read"

_LIBRARIES = ("h5py", "zarr", "nibabel", "numpy")  # Modules that open and read arrays in files.


class ReadError(ValueError):
    """Something cannot be read; the message is one line that names the file, the key and, if known, the sample."""


def note(error: BaseException, path: str, key: str, place: int | None = None) -> None:
    """Notes on an error the array that was being read, and the place of the sample in the batch if that is known."""
    if not hasattr(error, _NOTED):
        with contextlib.suppress(AttributeError):
            setattr(error, _NOTED, (path, key, place))


def as_read_error(error: BaseException, sample: object) -> ReadError | None:
    """The error to raise for an exception while samples were made; None if no file was to blame."""
    if isinstance(error, ReadError):
        return error
    found = getattr(error, _NOTED, None)
    if found is None:
        return None
    path, key, place = found
    if place is not None and isinstance(sample, list) and place < len(sample):
        sample = sample[place]
    named = f"{path}: {key!r}" if key else path
    return ReadError(f"{named}, sample {sample}: {_text(error)}")


def of_a_library(error: BaseException) -> str | None:
    """One line for an error of a library that opens or reads arrays in files, outside of samples; None for any other.

    Most name the file themselves. Where HDF5 cannot open one, it is the one that it was asked for, and where a key is
    missing that of the object that was asked for it.
    """
    if not isinstance(error, OSError | KeyError):
        return None
    room, file = "", ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        name = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        room = room if name == "distconv" else name  # which may substitute `open`
        names = frame.f_locals
        if frame.f_code.co_qualname == "File.__init__":
            file = os.fsdecode(names["name"]) if isinstance(names.get("name"), str | bytes | os.PathLike) else file
        else:
            file = getattr(getattr(names.get("self"), "file", None), "filename", file)
    if room not in _LIBRARIES:
        return None
    text = _text(error)
    return f"{file}: {text}" if file and os.path.basename(file) not in text else text


def _text(error: BaseException) -> str:
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    return text or type(error).__name__
