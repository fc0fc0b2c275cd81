"""The events of a rank's step, in order: operators of the program, kernels, starts of messages, and waits for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Operator:
    """The host runs one operator of the program on distributed tensors, on top of the kernels that it launches."""


@dataclass(frozen=True)
class Shape:
    """A tensor without its numbers."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class KernelCall:
    """How a kernel was called, so that it can be run again."""

    operator: Any  # Torch's operator.
    args: tuple[Any, ...]  # With a `Shape` in the place of each tensor.
    kwargs: tuple[tuple[str, Any], ...]  # Likewise, as pairs.

    def __str__(self) -> str:
        return f"{self.operator} {self.args} {self.kwargs}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _called, (str(self.operator), self.args, self.kwargs)  # torch's operators cannot be pickled


def _called(name: str, args: tuple[Any, ...], kwargs: tuple[tuple[str, Any], ...]) -> KernelCall:
    import torch

    return KernelCall(attrgetter(name)(torch.ops), args, kwargs)


@dataclass(frozen=True)
class Kernel:
    """A local computation."""

    name: str  # Torch's, such as "aten.convolution.default".
    flops: int  # Multiplications and additions.
    bytes: int  # Read and written.
    call: KernelCall | None = field(default=None, compare=False)  # How it was called; None where that is not known.


@dataclass(frozen=True)
class Start:
    """A collective starts."""

    number: int  # The number by which a `Wait` names it.
    kind: str
    """An allreduce of parameters' gradients is "gradients", any other "all_reduce"; else "all_to_all", "all_gather",
    "reduce_scatter" or "broadcast"."""
    ranks: tuple[int, ...]  # The ranks of the group, ascending.
    bytes: int  # The bytes of the whole tensor that is reduced, sent or gathered.
    sent: tuple[int, ...] = ()  # For an all-to-all the bytes to each of `ranks`, else empty.


@dataclass(frozen=True)
class Wait:
    """The rank needs the result of a collective."""

    number: int


Event = Operator | Kernel | Start | Wait


@dataclass(frozen=True)
class RecordedStep:
    """One training step on one rank."""

    events: tuple[Event, ...]  # The events of forward and backward, in order.
    rank: int  # Which rank it is.
    saved: int  # Bytes of the activations that forward keeps for backward, those of parameters left out.
    parameters: int  # Bytes of the rank's local parameters.
    tensors: int = 0  # How many of these there are.

    @property
    def launches(self) -> int:
        """Operators, kernels and collectives, each of which takes the host a moment."""
        return sum(not isinstance(event, Wait) for event in self.events)
