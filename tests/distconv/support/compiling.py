"""What tests of torch.compile begin with: a network of known numbers, and a compiler that knows of none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch._dynamo.utils import counters


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return kind().double()


@contextmanager
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    try:
        yield
    finally:
        torch._dynamo.reset()
