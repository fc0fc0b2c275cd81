"""What a checkpoint holds: sharded tensors as they are, for torch.distributed.checkpoint, or whole ones on request."""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from distconv.mesh import is_ours
from distconv.model.shard_gather import whole

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
    """Within it, torch.save and safetensors write the whole of what is sharded, as one process would write it.

    Every rank must call them, as ranks that run one script do. ValueError for a module with sharded parameters itself.
    """
    with contextlib.ExitStack() as undo:

        def replace(module: ModuleType, name: str, around: Callable[[Any], Any]) -> None:
            real = getattr(module, name)
            setattr(module, name, around(real))
            undo.callback(setattr, module, name, real)

        replace(torch, "save", _of_whole_state)
        if importlib.util.find_spec("safetensors") is not None:
            safetensors = importlib.import_module("safetensors.torch")
            for name in ("save", "save_file"):
                replace(safetensors, name, _of_whole_state)
            for name in ("save_model", "load_model"):
                replace(safetensors, name, _of_model_with_whole_state)
        yield


def _of_whole_state(save: Callable[..., Any]) -> Callable[..., Any]:
    name = f"{save.__module__.partition('.')[0]}.{save.__name__}"

    @functools.wraps(save)
    def save_whole(obj: Any, *args: Any, **kwargs: Any) -> Any:
        for module in (leaf for leaf in tree_leaves(obj) if isinstance(leaf, nn.Module)):
            if any(isinstance(p, DTensor) and is_ours(p.device_mesh) for p in module.parameters()):
                raise ValueError(
                    f"{name} of a {type(module).__name__}, whose parameters are sharded; accepted: its state_dict()"
                )
        return save(whole_state(obj), *args, **kwargs)

    return save_whole


def _of_model_with_whole_state(use: Callable[..., Any]) -> Callable[..., Any]:
    """safetensors compares the addresses and sizes of what `state_dict()` gives: those of whole tensors."""

    @functools.wraps(use)
    def with_whole_state(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        hook = model.register_state_dict_post_hook(lambda module, state, prefix, _: state.update(whole_state(state)))
        try:
            return use(model, *args, **kwargs)
        finally:
            hook.remove()

    return with_whole_state
