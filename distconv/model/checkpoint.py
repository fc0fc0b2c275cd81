"""What a checkpoint holds: sharded tensors as they are, for torch.distributed.checkpoint, or whole ones on request."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.model.shard_gather import whole
from distconv.partition import is_ours

T = TypeVar("T")


def whole_state(state: T) -> T:
    """A state with whole plain tensors in place of sharded ones, as one process would have it.

    All ranks of the meshes must call it, and each needs memory for the whole. To keep shards apart, save the state
    itself with `torch.distributed.checkpoint`, which loads it on any number of ranks.

    Args:
        state: any nested dicts, lists and tuples, such as `model.state_dict()` or `optimizer.state_dict()`.

    Returns:
        The same on every rank.
    """
    result = tree_map_only(DTensor, lambda x: whole(x.detach()) if is_ours(x.device_mesh) else x, state)
    if hasattr(state, "_metadata"):  # the versions of modules, which load_state_dict reads
        result._metadata = state._metadata
    return result


@contextlib.contextmanager
def saving_whole() -> Iterator[None]:
    """Within it, torch.save writes the whole of what is sharded, as one process would write it.

    Every rank must call it, as ranks that run one script do. ValueError for a module with sharded parameters itself.
    """
    save = torch.save

    def save_whole(obj: object, *args: Any, **kwargs: Any) -> None:
        for module in (leaf for leaf in tree_leaves(obj) if isinstance(leaf, nn.Module)):
            if any(isinstance(p, DTensor) and is_ours(p.device_mesh) for p in module.parameters()):
                raise ValueError(
                    f"torch.save of a {type(module).__name__}, whose parameters are sharded; accepted: its state_dict()"
                )
        save(whole_state(obj), *args, **kwargs)

    torch.save = save_whole
    try:
        yield
    finally:
        torch.save = save
