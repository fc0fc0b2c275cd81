"""Settings: what a user may choose for a job, by an option of `distconv run`, an argument or the environment.

Only this module reads the environment for them. An argument of a call wins over an option of `distconv run`, an option
over the environment, and the environment over the default.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from distconv.settings.channels import ALGORITHMS
from distconv.settings.partition import Partition
from mucudnn import spelling
from mucudnn.settings import VARIABLES, Setting, SettingError, one_of, parse_switch

__all__ = ["BACKENDS", "SETTINGS", "SettingError", "StoreOption", "flag", "options", "value"]

BACKENDS = ("gloo", "nccl", "mpi")
LEAST_SECRET = 16  # Bytes.


NO_PARTITION = (
    "no partition: give --partition AXIS=RANKS,... before the script (on one device --parts or --memory), or set "
    "DISTCONV_PARTITION"
)

AUTO = "auto"  # The partition, strategy or limit of memory that is to be chosen.


def _parse_partition(given: object) -> Partition | str:
    if isinstance(given, Partition) or given == AUTO:
        return given
    try:
        return Partition.parse(str(given))
    except ValueError as error:
        raise SettingError(str(error)) from None


@dataclass(frozen=True)
class StoreOption:
    """The amount of read data that a rank may keep, and whether the rest may be read from files again."""

    gib: float | None  # The most GiB of a rank; None for a share of the memory that is free.
    disk: bool  # What does not fit is read from files in every epoch; else it is refused.


def _matched(pattern: str, given: object) -> re.Match[str]:
    found = re.fullmatch(pattern, str(given))
    if found is None:
        raise ValueError
    return found


def _parse_store(given: object) -> StoreOption:
    found = _matched(r"memory(?:=(\d+(?:\.\d*)?|\.\d+))?(\+disk)?", given)
    return StoreOption(None if found[1] is None else float(found[1]), found[2] is not None)


def _parse_halo(given: object) -> float:
    found = _matched(r"layer|chain(?:=(\d+))?", given)
    return 0.0 if given == "layer" else math.inf if found[1] is None else float(found[1])


def _parse_seconds(given: object) -> float:
    seconds = math.inf if given == "never" else float(str(given))
    if given != "never" and not 1 <= seconds < math.inf:
        raise ValueError
    return seconds


def _parse_secret(given: object) -> bytes:
    try:
        with open(str(given), "rb") as file:
            status, content = os.fstat(file.fileno()), file.read()
    except OSError:
        raise ValueError from None
    if status.st_uid != os.geteuid() or status.st_mode & 0o077 or len(content) < LEAST_SECRET:
        raise ValueError
    return content


def _words(variable: str, default: str | None, words: Sequence[str], what: str) -> Setting:
    """A setting that accepts some words."""
    return Setting(variable, lambda: default, ", ".join(words), what, one_of(*words), "|".join(words))


SETTINGS = {
    "partition": Setting(
        "DISTCONV_PARTITION",
        lambda: None,
        "axis=ranks,...",
        "mesh axes and the ranks along each; their product is the number of ranks (default: the partition of '*' in "
        "the strategy); with run, auto chooses a partition for every layer",
        _parse_partition,
        "AXIS=RANKS,...",
    ),
    "backend": _words(
        "DISTCONV_BACKEND",
        None,
        BACKENDS,
        "what carries the messages between ranks; default: mpi under mpiexec, nccl where every rank has a GPU of its "
        "own, gloo elsewhere",
    ),
    "channel_algorithm": _words(
        "DISTCONV_CHANNEL_ALGORITHM",
        "auto",
        ALGORITHMS,
        "the tensor that stays in place in layers split by the axes channel and filter: the input (x: best if a layer "
        "has fewer filters than channels), the output (y), the weight (w, on both axes), or the choice that moves "
        "least (auto, the default)",
    ),
    "check": _words(
        "DISTCONV_CHECK",
        "on",
        ("on", "off"),
        "whether the ranks compare checksums of data that must be the same on all of them: inputs, targets, parameters "
        "(default: on)",
    ),
    "debug": _words(
        "DISTCONV_DEBUG",
        None,
        ("messages", "layouts"),
        "print a line for each collective of a model (messages), or for each function, with the layouts of its "
        "operands and its result (layouts); --print-all-ranks shows those of every rank",
    ),
    "random": _words(
        "DISTCONV_RANDOM",
        None,
        ("same", "apart"),
        "what dropout and other random operators of a model draw: the numbers of one process, of which a rank keeps "
        "its shard's (same: the default on processors), or separate numbers per shard (apart: the only mode on GPUs)",
    ),
    "halo": Setting(
        "DISTCONV_HALO",
        lambda: "layer",
        "layer, chain, chain=ROWS",
        "how wide a halo is fetched: what one layer reads (layer: the default), or what several layers in a row read, "
        "at most ROWS on a side (chain): fewer messages, but several ranks compute the same rows",
        _parse_halo,
        "layer|chain[=ROWS]",
    ),
    "halo_priority": _words(
        "DISTCONV_HALO_PRIORITY",
        "high",
        ("high", "normal"),
        "over NCCL: send halos in a stream of high priority and a communicator of their own, so that no other kernel "
        "delays them (high: the default), or in the communicator of all messages along an axis (normal)",
    ),
    "lost_after": Setting(
        "DISTCONV_LOST_AFTER",
        lambda: "8",
        "a number of seconds, at least 1, or never",
        "in a job on several machines: the seconds that a machine may be silent before the job ends; never: without "
        "end (default: 8)",
        _parse_seconds,
        "SECONDS|never",
    ),
    "results": _words(
        "DISTCONV_RESULTS",
        "device",
        ("device", "host"),
        "with --parts: where the results of calls without gradients are stored (default: device); host: each part's "
        "piece is copied to the host as soon as it is computed, so results may be larger than the device's memory",
    ),
    "secret": Setting(
        "DISTCONV_SECRET",
        lambda: None,
        "a file with at least 16 bytes that its owner alone can read",
        "in a job on several machines: a file with the same content on each, from which the ranks derive the numbers "
        "of the secrets module and of os.urandom, so that others cannot read them",
        _parse_secret,
        "FILE",
    ),
    "shard_parameters": Setting(
        "DISTCONV_SHARD_PARAMETERS",
        lambda: "off",
        "on, off",
        "shard large parameters, their gradients and optimizer states along all axes of the partition, and gather each "
        "parameter just before a layer computes with it, as FSDP does (default: along channel and filter alone)",
        parse_switch,
    ),
    "slow_after": Setting(
        "DISTCONV_SLOW_AFTER",
        lambda: "30",
        "a number of seconds, at least 1, or never",
        "the seconds that a rank may wait in a collective before one line names the collective, the ranks that it "
        "waits for, and where these are; the job continues (default: 30)",
        _parse_seconds,
        "SECONDS|never",
    ),
    "store": Setting(
        "DISTCONV_STORE",
        lambda: None,
        "memory, memory=GIB, memory+disk, memory=GIB+disk",
        "with --shard-data: each rank keeps the data that it has read in memory, at most GIB (default: its part of "
        "half of the machine's free memory), and later epochs get them from there and from other ranks; data that "
        "do not fit are refused, or read from files (+disk)",
        _parse_store,
        "memory[=GIB][+disk]",
    ),
}
"""Every setting by its name. A new one is an entry here: `distconv run` then has its option and names its variable."""

BETWEEN_PROCESSES = ("DISTCONV_FILES", "DISTCONV_STARTER", "DISTCONV_CHOSEN")
"""Environment variables by which the processes of a job inform one another; users set none of them."""


def report_unknown_variables() -> None:
    """Prints a line for each environment variable of distconv's or mucudnn's that nobody reads; a job does so once."""
    if not any(name in os.environ for name in BETWEEN_PROCESSES):
        spelling.report_unknown("DISTCONV", [setting.variable for setting in SETTINGS.values()])
        spelling.report_unknown("MUCUDNN", VARIABLES)


_options: dict[str, Any] = {}  # The values that the options of this process's `distconv run` gave.


_of_call: ContextVar[Mapping[str, Any]] = ContextVar("_of_call", default=MappingProxyType({}))
"""What counts for one call in one thread, and in the threads that compute it."""


@contextmanager
def within_call(given: Mapping[str, object]) -> Iterator[None]:
    """As `options`, for what this thread calls; other threads go on with theirs."""
    values = {name: SETTINGS[name].value(flag(name), text) for name, text in given.items()}
    before = _of_call.set({**_of_call.get(), **values})
    try:
        yield
    finally:
        _of_call.reset(before)


def flag(name: str) -> str:
    """The option of a setting, such as `--channel-algorithm`."""
    return f"--{name.replace('_', '-')}"


def value(name: str, argument: object = None) -> Any:
    """The value of a setting now; None where nothing but an empty variable gives one and it has no default.

    Args:
        name: a key of `SETTINGS`.
        argument: what a call was given, None for nothing.

    Raises:
        SettingError: one line, for a value that is not accepted.
    """
    setting = SETTINGS[name]
    if argument is not None:
        return setting.value(name, argument)
    if name in _of_call.get():
        return _of_call.get()[name]
    if name in _options:
        return _options[name]
    return setting.sourced(os.environ)[0]


@contextmanager
def options(given: Mapping[str, object]) -> Iterator[None]:
    """For a while, what the options of `distconv run` gave; those that are None leave their setting to the environment.

    Raises:
        SettingError: one line, for a value that is not accepted.
    """
    before = dict(_options)
    values = {name: SETTINGS[name].value(flag(name), text) for name, text in given.items() if text is not None}
    _options.update(values)
    try:
        yield
    finally:
        _options.clear()
        _options.update(before)
