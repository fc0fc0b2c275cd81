"""Checkpoints of sharded models with whole tensors, on request; torch.distributed.checkpoint saves the shards."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from distconv.model.shard_gather import whole
from distconv.tensors.mesh import is_ours
from distconv.tensors.replacements import in_place_of
from mucudnn.process import substituted

T = TypeVar("T")


def whole_state(state: T) -> T:
    """A copy of a state with whole plain tensors in place of sharded ones, as a single process would save it.

    All ranks of the meshes must call it, and each needs memory for the whole. To keep shards apart, save the state
    itself with `torch.distributed.checkpoint`, which loads it on any number of ranks.

    Args:
        state: any nested dicts, lists and tuples, such as `model.state_dict()` or `optimizer.state_dict()`.

    Returns:
        The same on every rank.
    """
    result = tree_map_only(DTensor, lambda x: whole(x.detach()) if is_ours(x.device_mesh) else x, state)
    for name, value in getattr(state, "__dict__", {}).items():  # such as `_metadata`, which load_state_dict reads
        setattr(result, name, value)
    return result


@contextlib.contextmanager
def saving_whole() -> Iterator[None]:
    """A context in which safetensors writes sharded tensors whole, as pickles do (`distconv.rules.values.numbers`).

    Every rank must call it, as ranks that run one script do.
    """
    if importlib.util.find_spec("safetensors") is None:
        yield
        return
    safetensors = importlib.import_module("safetensors.torch")
    around: dict[str, Callable[..., Any]] = dict.fromkeys(("save", "save_file"), _save_whole)
    around |= dict.fromkeys(("save_model", "load_model"), _with_whole_state)
    own = {name: in_place_of(getattr(safetensors, name), function) for name, function in around.items()}
    with substituted(safetensors, **own):
        yield


def _save_whole(save: Callable[..., Any], obj: Any, *args: Any, **kwargs: Any) -> Any:
    return save(whole_state(obj), *args, **kwargs)


def _with_whole_state(use: Callable[..., Any], model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Makes `state_dict()` give whole tensors to safetensors, which compares their addresses and sizes."""
    hook = model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(whole_state(state)))
    try:
        return use(model, *args, **kwargs)
    finally:
        hook.remove()
