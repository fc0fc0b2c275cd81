"""What DISTCONV_DEBUG prints on stderr while a model runs: its messages, or the layouts of its activations."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_leaves

from distconv.tensors.user_lines import asked_for
from mucudnn.process import print_line
from mucudnn.sizes import format_bytes


def show_message(kind: str, x: Tensor, sent: int, group: dist.ProcessGroup | None) -> None:
    """Prints a line for a collective that begins: what this rank sends, to whom, and which line of the program asks."""
    rank = dist.get_rank()
    others = ", ".join(f"r{other}" for other in dist.get_process_group_ranks(group) if other != rank)
    what = f"{'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}"
    print_line(f"r{rank} {kind} of {what} -> {others}: {format_bytes(sent)} sent, {asked_for()}")


class ShownLayouts(TorchFunctionMode):
    """Prints a line for each function of a model that makes an activation: the layouts of operands and result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, DTensor) and getattr(func, "__name__", "__get__") != "__get__":
            operands = ", ".join(str(x._spec) for x in tree_leaves((args, kwargs)) if isinstance(x, DTensor))
            print_line(f"r{dist.get_rank()} {resolve_name(func)} of {operands} -> {result._spec}, {asked_for()}")
        return result
