"""Messages of a fake group, for `benchmarks/distributed/host.py`: they arrive at once, and are counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from distconv.transfer import group_calls

library = torch.library.Library("_c10d_functional", "IMPL")


class _Done:
    """The work of a message that needs no time; that of a fake group has not ended before it is waited for."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> bool:
        return True


def let_messages_arrive_at_once() -> None:
    """And lets a fake group exchange nothing for something, which it refuses, in a graph and outside of one."""
    stock = group_calls.all_to_all_single

    def exchange(output: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if input.numel():
            stock(output, input, *args, **kwargs)
        return _Done()

    group_calls.all_to_all_single = exchange

    def exchanged(input: Tensor, received: list[int], sent: list[int], group: str) -> Tensor:
        return input.new_empty((sum(received), *input.shape[1:]))

    library.impl("all_to_all_single", exchanged, "CPU")


class Messages(TorchDispatchMode):
    """Counts the collectives that are called while it is on, and the bytes that this process hands to them."""

    INPUTS = ("input", "tensors", "inputs", "input_tensor", "input_tensors", "self")
    WAITS = ("wait_tensor", "barrier", "monitored_barrier_")

    def __init__(self) -> None:
        super().__init__()
        self.calls = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func._opname not in self.WAITS:
            given = {argument.name: arg for argument, arg in zip(func._schema.arguments, args, strict=False)}
            sent = next(given[name] for name in self.INPUTS if name in given)
            self.calls += 1
            self.bytes += sum(x.numel() * x.element_size() for x in torch.utils._pytree.tree_leaves(sent))
        return func(*args, **(kwargs or {}))
