"""What the questions of `first_contact.py` have in common: answers, and the convolution they are put to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from mucudnn.convolution.problem import ConvProblem, Direction
from mucudnn.planning.planner import Planner
from mucudnn.providers import Provider
from mucudnn.settings import MEMORY, Settings
from mucudnn.timing.store import Store

MIB = 2**20


class Answer(NamedTuple):
    """
    Attributes:
        answer: in a word or a few.
        figure: what it rests on, in one line.
    """

    answer: str
    figure: str


class NeedsGpu(Exception):
    """A question that only a GPU answers."""


@dataclass(frozen=True)
class Question:
    """
    Attributes:
        text: what is asked.
        ask: answers on a device.
    """

    text: str
    ask: Callable[[torch.device], Answer]


def needs_gpu(device: torch.device) -> None:
    """
    Raises:
        NeedsGpu: on a host.
    """
    if device.type != "cuda":
        raise NeedsGpu("needs a GPU")


PRECISIONS = {
    "float32": ("float32", "contiguous", False),
    "TF32": ("float32", "contiguous", True),
    "float16": ("float16", "channels_last", False),
}
"""The type, the memory format, and whether TF32 is allowed."""


def alexnet_conv2(device: torch.device, direction: Direction, precision: str = "float32") -> ConvProblem:
    """The second convolution of AlexNet over 64 samples; on a host a small one."""
    dtype, memory_format, _ = PRECISIONS[precision]
    given, weight = ((64, 64, 27, 27), (192, 64, 5, 5)) if device.type == "cuda" else ((8, 8, 12, 12), (8, 8, 5, 5))
    one, two = (1, 1), (2, 2)
    plain = ConvProblem.of_convolution(direction, given, weight, stride=one, padding=two, dilation=one)
    return replace(plain, dtype=dtype, formats=(memory_format,) * 3)


@contextmanager
def precise(precision: str) -> Iterator[None]:
    """Torch's switch for TF32."""
    before = torch.backends.cudnn.conv.fp32_precision
    torch.backends.cudnn.conv.fp32_precision = "tf32" if PRECISIONS[precision][2] else "ieee"
    try:
        yield
    finally:
        torch.backends.cudnn.conv.fp32_precision = before


def planner_on(device: torch.device, policy: str = "undivided") -> Planner:
    """A planner without a database."""
    settings = Settings.from_environment({}, database=MEMORY, policy=policy, progress="off")
    return Planner(settings, Store(MEMORY), device=device)


def algorithms(device: torch.device, problem: ConvProblem) -> dict[str, Provider]:
    """Who serves the problem, by algorithm, torch's own kernel left out."""
    named = planner_on(device).offers.providers(problem).items()
    return {name: who for name, who in named if name != "stock" and who.serves(problem, name)}


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
