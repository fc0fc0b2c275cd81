"""Layers with state: what models do to their own parameters, buffers and attributes while they compute.

A block of kind "state" holds one layer, of which it changes a parameter, or keeps something of the input. ``where``
tells who does it: the block's forward, a hook of the layer, or a hook of the parameter in backward. Nothing changes in
evaluation, in which networks are run once to learn shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from benchmarks.campaign.layers import Layer, Shape

Changed = Callable[[Any, Tensor], Any]
"""Changes ``module.weight``; a mask for it is given."""


def _assigned(layer: Any, mask: Tensor) -> None:
    layer.weight.data = layer.weight.data * mask


def _masked_data(layer: Any, mask: Tensor) -> None:
    layer.weight.data *= mask


def _renormed(layer: Any, mask: Tensor) -> None:
    layer.weight.data = torch.renorm(layer.weight.data, p=2, dim=0, maxnorm=0.3)


def _binarized(layer: Any, mask: Tensor) -> None:
    weight = layer.weight
    latent = getattr(weight, "org", None)
    weight.org = weight.data.clone() if latent is None else 0.5 * (latent + weight.data)
    weight.data = weight.org.sign() * weight.org.abs().mean()


def _replaced(layer: Any, mask: Tensor) -> None:
    if layer.weight.grad is None:
        layer.weight = nn.Parameter(layer.weight.data * mask)


def _registered(layer: Any, mask: Tensor) -> None:
    weight = layer.weight
    del layer.weight
    layer.register_parameter("weight", weight)
    layer.weight.data.mul_(mask)


def _set(layer: Any, mask: Tensor) -> None:
    layer.weight.set_((layer.weight * mask).contiguous())


CHANGES: dict[str, Changed] = {
    "data *=": _masked_data,
    "data mul_": lambda layer, mask: layer.weight.data.mul_(mask),
    "data =": _assigned,
    "renorm": _renormed,
    "data clamp_": lambda layer, mask: layer.weight.data.clamp_(-0.2, 0.2),
    "data copy_": lambda layer, mask: layer.weight.data.copy_(layer.weight.data * mask),
    "detach mul_": lambda layer, mask: layer.weight.detach().mul_(mask),
    "vars": lambda layer, mask: vars(layer)["_parameters"]["weight"].data.mul_(mask),
    "mul_": lambda layer, mask: layer.weight.mul_(mask),
    "copy_": lambda layer, mask: layer.weight.copy_(layer.weight * mask),
    "clamp_": lambda layer, mask: layer.weight.clamp_(-0.2, 0.2),
    "set_": _set,
    "binarized": _binarized,
    "replaced": _replaced,
    "registered": _registered,
}
"""Ways to change a parameter, called without recording gradients."""


def _mean(x: Tensor) -> Tensor:
    return x.detach().mean((0, *range(2, x.dim())))


class State(nn.Module):
    """A layer whose state changes when it is called; called twice, with another input, where ``twice`` says so."""

    mask: Tensor
    mean: Tensor
    queue: Tensor
    count: Tensor

    def __init__(self, layer: nn.Module, described: Layer, shape: Shape) -> None:
        super().__init__()
        self.layer = layer
        self.way, self.twice = described["way"], described["twice"]
        self.keeps = KEPT.get(self.way)
        if self.keeps is not None:
            self.calls, self.seen = 0, list[float]()
            self.slow: list[Tensor] = []
            self.scale = nn.Parameter(torch.ones(shape[1], *[1] * (len(shape) - 2)))
            self.register_buffer("mean", torch.zeros(shape[1]))
            self.register_buffer("queue", torch.zeros(4, shape[1]))
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            return
        target = next(each for each in layer.modules() if isinstance(getattr(each, "weight", None), nn.Parameter))
        if self.way in MADE:
            MADE[self.way](target)
            return
        weight: Any = target.weight
        if self.way == "renorm" and weight.dim() < 2:
            raise ValueError("a vector has no rows")
        marks = torch.arange(weight.numel()).view(weight.shape) % 3 != 1
        self.register_buffer("mask", marks.to(weight.dtype))
        self._change = functools.partial(self._changed, (target,))
        where = described["where"]
        if where == "pre-hook":
            target.register_forward_pre_hook(lambda *_: self._change())
        elif where == "hook":
            target.register_forward_hook(lambda *_: self._change())
        elif where == "backward":
            weight.register_post_accumulate_grad_hook(lambda _: self._change())
        self.in_forward = where == "forward"

    def _changed(self, target: tuple[nn.Module]) -> None:
        """``target``: in a tuple, so that it does not count as a module of this one, too."""
        if self.training:
            with torch.no_grad():
                CHANGES[self.way](target[0], self.mask)

    def forward(self, x: Tensor) -> Tensor:
        y = self._once(x)
        return y + self._once(0.5 * x) if self.twice else y

    def _once(self, x: Tensor) -> Tensor:
        if self.keeps is not None:
            return self.keeps(self, x) if self.training else self.layer(x)
        if self.way in CHANGES and self.in_forward:
            self._change()
        y: Tensor = self.layer(x)
        return y


def _counted(state: State, x: Tensor) -> Tensor:
    state.count += 1
    return state.layer(x) * (1 + 0.1 * state.count)


def _counted_by_attribute(state: State, x: Tensor) -> Tensor:
    state.calls += 1
    return state.layer(x) * (1 + 0.1 * state.calls)


def _listed(state: State, x: Tensor) -> Tensor:
    state.seen.append(x.detach().mean().item())
    return state.layer(x) + sum(state.seen) / len(state.seen)


@torch.no_grad()
def _write_queue(state: State, x: Tensor) -> None:
    place = int(state.count)
    state.queue[place] = _mean(x)
    state.count[...] = (place + 1) % len(state.queue)


def _queued(state: State, x: Tensor) -> Tensor:
    _write_queue(state, x)
    return state.layer(x) + state.queue.clone().mean()


def _rolled(state: State, x: Tensor) -> Tensor:
    state.queue = torch.cat((_mean(x)[None], state.queue[:-1]))
    return state.layer(x) + state.queue.mean()


def _moved_in_place(state: State, x: Tensor) -> Tensor:
    with torch.no_grad():
        state.mean.mul_(0.9).add_(_mean(x), alpha=0.1)
    return state.layer(x) + state.mean.clone().sum()


def _moved_by_assignment(state: State, x: Tensor) -> Tensor:
    state.mean = 0.9 * state.mean + 0.1 * _mean(x)
    return state.layer(x) + state.mean.sum()


def _moved_data(state: State, x: Tensor) -> Tensor:
    state.mean.data = 0.9 * state.mean.data + 0.1 * _mean(x)
    return state.layer(x) + state.mean.clone().sum()


def _copied(state: State, x: Tensor) -> Tensor:
    with torch.no_grad():
        state.mean.copy_(torch.lerp(state.mean, _mean(x), 0.1))
    return state.layer(x) + state.mean.clone().sum()


def _begun_by_data(state: State, x: Tensor) -> Tensor:
    if not state.count:
        state.scale.data.copy_(1 / (0.5 + _mean(x).abs()).view(state.scale.shape))
        state.count.fill_(1)
    return state.layer(x * state.scale)


def _twin(state: State, x: Tensor) -> Tensor:
    y = state.layer(x)
    with torch.no_grad():
        if not state.slow:
            state.slow = [p.detach().clone() for p in state.layer.parameters()]
        for slow, fast in zip(state.slow, state.layer.parameters(), strict=True):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        named = dict(zip((name for name, _ in state.layer.named_parameters()), state.slow, strict=True))
        beside = torch.func.functional_call(state.layer, named, (x,))
    return y + 0.5 * beside.detach()


def _called_with_others(state: State, x: Tensor) -> Tensor:
    others = {name: 0.9 * p for name, p in state.layer.named_parameters()}
    y: Tensor = torch.func.functional_call(state.layer, others, (x,))
    return y


KEPT: dict[str, Callable[[State, Tensor], Tensor]] = {
    "counter": _counted,
    "attribute": _counted_by_attribute,
    "list": _listed,
    "queue": _queued,
    "rolled queue": _rolled,
    "mean in place": _moved_in_place,
    "mean =": _moved_by_assignment,
    "mean data =": _moved_data,
    "mean copy_": _copied,
    "begun by data": _begun_by_data,
    "twin": _twin,
    "functional_call": _called_with_others,
}
"""What a block keeps of its calls, and what comes out of it."""


class Masked(nn.Module):
    """A parametrization that counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, weight: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return weight.clamp(-0.3, 0.3) * (1 + 0.1 * self.calls)


MADE: dict[str, Callable[..., Any]] = {
    "parametrized": lambda layer: parametrize.register_parametrization(layer, "weight", Masked()),
    "spectral norm": parametrizations.spectral_norm,
    "spectral norm by a hook": nn.utils.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "weight norm by a hook": nn.utils.weight_norm,
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
}
"""What is made of a layer before it is trained."""

OF_WEIGHTS = ("convolution", "transposed", "norm", "linear")


def is_drawn(random: Random, layer: Layer) -> bool:
    """Whether a layer is to have state."""
    return random.random() < (0.6 if layer["kind"] in OF_WEIGHTS else 0.15)


def drawn(random: Random, layer: Layer) -> Layer:
    """A block around a layer, for which it need not fit."""
    way = random.choice([*CHANGES, *MADE, *KEPT] if layer["kind"] in OF_WEIGHTS else [*KEPT])
    where = random.choice(("forward", "forward", "forward", "pre-hook", "hook", "backward"))
    return {"kind": "state", "way": way, "where": where, "twice": random.random() < 0.2, "layers": [layer]}
