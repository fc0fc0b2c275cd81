"""What tells of a file that cannot be read: one line with the file, the key and the sample."""

from __future__ import annotations

import contextlib

_NOTED = "_distconv_read"


class ReadError(ValueError):
    """Something cannot be read; the message is one line that names the file, the key and, where it is known, the
    sample."""


def note(error: BaseException, path: str, key: str, place: int | None = None) -> None:
    """What was being read, and the place of the sample in the batch where that is known."""
    if not hasattr(error, _NOTED):
        with contextlib.suppress(AttributeError):
            setattr(error, _NOTED, (path, key, place))


def as_read_error(error: BaseException, sample: object) -> ReadError | None:
    """What to raise for an exception that came up while a sample, or those of a list, were made; None where no file was
    to blame."""
    if isinstance(error, ReadError):
        return error
    found = getattr(error, _NOTED, None)
    if found is None:
        return None
    path, key, place = found
    if place is not None and isinstance(sample, list) and place < len(sample):
        sample = sample[place]
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    named = f"{path}: {key!r}" if key else path
    return ReadError(f"{named}, sample {sample}: {text or type(error).__name__}")
