"""How wide the halos of a model's call are: what each layer reads, or what several in a row read."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from distconv import settings
from distconv.model.direct.activation import Activation
from distconv.model.direct.chains.call import Choice, chained
from distconv.model.direct.chains.choice import Prices
from mucudnn.process.recent import Recent

PRICES = {"cpu": Prices(exchange=3e-4, received=1e-9, operation=5e-11, written=2e-10)}
"""Seconds by kind of device, in round numbers; on CPUs those of one core, and of two processes on one machine."""

GPU_PRICES = Prices(exchange=6e-5, received=1e-11, operation=5e-14, written=1e-12)
"""Those of other devices: GPUs that reach each other without a network."""

MOST_KINDS = 64  # The most kinds of calls of a model for which a choice is kept.

_choices: weakref.WeakKeyDictionary[nn.Module, Recent[Hashable, Choice]] = weakref.WeakKeyDictionary()


def halos(module: nn.Module, args: Any, kwargs: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which an outermost call with these inputs fetches halos as the setting `halo` says."""
    most = settings.value("halo")
    if not most:
        return contextlib.nullcontext()
    places = tuple(x.place for x in tree_leaves((args, kwargs)) if type(x) is Activation)
    if not places:
        return contextlib.nullcontext()
    kind = places, module.training, torch.is_grad_enabled()
    return chained(_choices_of(module), kind, PRICES.get(places[0].mesh.device_type, GPU_PRICES), most)


def share_choices(module: nn.Module, copied: nn.Module) -> None:
    """Lets two modules share the choices that are made for calls of either."""
    _choices[copied] = _choices_of(module)


def _choices_of(module: nn.Module) -> Recent[Hashable, Choice]:
    return _choices.setdefault(module, Recent(MOST_KINDS))
