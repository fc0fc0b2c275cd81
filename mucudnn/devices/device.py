"""The interface of a device on which convolutions run: its clock, its memory and its switches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Protocol

import torch

Work = Callable[[], object]


class Clock(Protocol):
    """Measures how long work takes on its device."""

    repetitions: int  # The most repetitions of a time, of which the median is taken.

    def first(self, work: Work) -> float:
        """Seconds of a first call, but for what it does more than later ones, such as loading kernels."""

    def seconds(self, work: Work, expected: float | None = None) -> float:
        """Seconds of one call. ``expected``: about what it takes, if that is known."""


class Stopwatch(Protocol):
    """Measures how long the program's own work takes on its device, from the moment when the stopwatch is made."""

    def lap(self) -> None:
        """Ends a lap after all work so far."""

    def laps(self) -> list[float] | None:
        """Seconds of every lap; `None` while work of them is not done. Never waits."""


class Device(ABC):
    """A device of this process."""

    is_asynchronous: ClassVar[bool]
    """Whether a call only enqueues its work, which may still wait when the call has returned."""
    uses_cudnn: ClassVar[bool]  # Whether torch computes convolutions by cuDNN there.

    def __init__(self, place: torch.device) -> None:
        self.place = place  # Torch's name of the device.

    @staticmethod
    @abstractmethod
    def switches() -> tuple[object, ...]:
        """The switches that a program may change between two calls, and that decide how these are computed.

        The shim reads it at every convolution: it takes a fraction of a microsecond.
        """

    @staticmethod
    def on_its_device(kernel: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel that runs on the device of its first argument, a tensor, whichever device is current."""
        return kernel

    @property
    @abstractmethod
    def name(self) -> str:
        """The kind and the model, for people and for the database."""

    @property
    @abstractmethod
    def memory(self) -> int:
        """Physical memory, in bytes."""

    @property
    def cache(self) -> int:
        """Bytes of the cache in which a convolution that is called again and again would find its operands.

        0 where there is no such danger when it is timed.
        """
        return 0

    @property
    def threads(self) -> int:
        """Threads that a call is computed by; 0 where that is not the program's choice."""
        return 0

    @property
    def is_deterministic(self) -> bool:
        """Whether only deterministic algorithms may run now."""
        return torch.are_deterministic_algorithms_enabled()

    @property
    @abstractmethod
    def precision(self) -> str:
        """The switches that let a call be computed in a narrower type, or otherwise than usual, as text."""

    def least_seconds(self, operations: float, written: float, fresh: float, dtype: torch.dtype) -> float:
        """The least time that so much work takes on the device: 0 where nothing is known.

        Args:
            operations: of floating-point numbers of a type.
            written: bytes, to new tensors.
            fresh: of these, bytes of tensors of at least `speeds.LARGE`.
        """
        return 0.0

    def measure_speeds(self, dtype: torch.dtype) -> float:
        """Measures once more what `least_seconds` needs, as this moment may be quieter; the seconds that it took."""
        return 0.0

    def took(self, seconds: float, operations: float, written: float, fresh: float, dtype: torch.dtype) -> bool:
        """Notes what so much work, as `least_seconds` has it, took in fact; whether the device is faster than known."""
        return False

    @property
    def libraries(self) -> str:
        """Versions of what computes beside torch, as text; empty for nothing."""
        return ""

    @property
    @abstractmethod
    def clock(self) -> Clock:
        """The clock that times work on the device."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A new tensor, in the least time: every result of a planned convolution is one."""

    @abstractmethod
    def stopwatch(self) -> Stopwatch:
        """A new one, on the current stream."""

    @abstractmethod
    def bytes_in_use(self) -> int:
        """Bytes that the program has allocated now."""

    def outside(self) -> int:
        """Bytes in use there that torch's allocator has not reserved, by whomever: 0 where there is no such allocator.

        On a GPU these are CUDA's own, the code of kernels, what libraries take for themselves, and other processes.
        """
        return 0

    @abstractmethod
    def finish(self) -> None:
        """Waits until all work that was enqueued is done."""

    def is_capturing(self) -> bool:
        """Whether calls are recorded rather than run, so that nothing can be measured."""
        return False
