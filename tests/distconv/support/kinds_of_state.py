"""Models that change their state while they compute, each in another way."""

from __future__ import annotations

import collections
import copy
import itertools
import queue
import random
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils import parametrize as parametrizing
from torch.utils.checkpoint import checkpoint

kept: dict[str, Any] = {}
seen: list[Any] = []
calls = 0


class Layer(nn.Conv2d):
    """A convolution that does something to its state before it computes."""

    def __init__(self, before: Callable[[Any, Tensor], None]) -> None:
        super().__init__(2, 2, 3, padding=1)
        self.before = before
        mask = torch.ones_like(self.weight)
        mask[..., 1, 1:] = 0
        self.register_buffer("mask", mask)
        self.register_buffer("mean", torch.zeros(2))
        self.at, self.past, self.found = 0, torch.zeros(8, 2), collections.deque(maxlen=3)
        self.counts: collections.Counter[str] = collections.Counter()

    def forward(self, x: Tensor) -> Tensor:
        self.before(self, x)
        return super().forward(x)


def _multiply(self: Layer, x: Tensor) -> None:
    self.weight.data *= self.mask


def _in_place(self: Layer, x: Tensor) -> None:
    self.weight.data.mul_(self.mask)


def _assigned(self: Layer, x: Tensor) -> None:
    self.weight.data = self.weight.data * self.mask


def _renormed(self: Layer, x: Tensor) -> None:
    self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)


@torch.no_grad()
def _without_gradients(self: Layer, x: Tensor) -> None:
    self.weight.mul_(self.mask).add_(0.01)
    self.weight[0] *= 0.9


@torch.no_grad()
def _copied(self: Layer, x: Tensor) -> None:
    self.weight.copy_(self.weight * self.mask)


def _set(self: Layer, x: Tensor) -> None:
    self.weight.data.set_((self.weight.data * self.mask).contiguous())
    with torch.no_grad():
        self.bias.set_(self.bias * 0.5)
        self.weight.set_(self.weight * 0.9)


def _swapped(self: Layer, x: Tensor) -> None:
    torch.utils.swap_tensors(self.weight, nn.Parameter(self.weight.detach() * self.mask))


@torch.no_grad()
def _by_itself(self: Layer, x: Tensor) -> None:
    self.weight.mul_(self.weight.abs())
    torch.mul(self.weight, 0.9, out=self.weight)
    with torch.inference_mode():
        self.bias.mul_(0.9)


def _replaced(self: Layer, x: Tensor) -> None:
    if self.at == 0:
        self.weight = nn.Parameter(self.weight.data * self.mask)
    self.at += 1


def _registered(self: Layer, x: Tensor) -> None:
    if self.at == 1:
        value = self.bias.data * 0.5
        del self.bias
        self.register_parameter("bias", nn.Parameter(value))
    self.at += 1


def _binarized(self: Layer, x: Tensor) -> None:
    if not hasattr(self.weight, "latent"):
        self.weight.latent = self.weight.data.clone()
    self.weight.latent.clamp_(-0.2, 0.2).mul_(0.99)
    self.weight.data = self.weight.latent.sign() * 0.1


def _by_name(self: Layer, x: Tensor) -> None:
    for parameter in self.parameters():
        parameter.data.clamp_(-0.1, 0.1)
    dict(self.named_parameters())["weight"].detach().mul_(0.9)
    vars(self)["_parameters"]["weight"].data += 0.01


def _together(self: Layer, x: Tensor) -> None:
    torch._foreach_mul_([p.data for p in self.parameters()], 0.9)
    nn.init.constant_(self.bias, 0.1)
    torch.clamp(self.weight.data, -0.1, 0.1, out=self.weight.data)


def _by_array(self: Layer, x: Tensor) -> None:
    self.weight.data.numpy()[0] *= 0.9


def _counted(self: Layer, x: Tensor) -> None:
    global calls
    calls += 1
    self.at += 1
    self.counts["calls"] += 1
    self.weight.data *= 1 / (1 + self.at)
    seen.append(self.at)


def counting() -> Callable[[Layer, Tensor], None]:
    def count(self: Layer, x: Tensor, counts: list[int] = [0]) -> None:  # noqa: B006
        counts[0] += 1
        self.weight.data *= 1 / (1 + counts[0])

    return count


def _queued(self: Layer, x: Tensor) -> None:
    with torch.no_grad():
        key = x.mean((2, 3))
        self.past[self.at : self.at + len(key)] = key
        self.at = (self.at + len(key)) % len(self.past)
        self.found.append(key)
        self.mean.mul_(0.9).add_(key.mean(0), alpha=0.1)
        self.mean.data += 0.5
        kept["key"] = key


def _drawn(self: Layer, x: Tensor) -> None:
    if not hasattr(self, "generator"):
        self.generator, self.other, self.numbers = torch.Generator().manual_seed(1), random.Random(2), itertools.count()
    self.weight.data *= torch.rand(self.weight.shape, generator=self.generator) * self.other.random()


class Slotted:
    """An object whose attributes are fixed."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Noted:
    """An object of the program."""

    total = 0

    def __init__(self) -> None:
        self.other = Slotted()
        self.count, self.found = 0, [torch.zeros(())]

    def note(self, x: Tensor) -> None:
        self.count += 1
        self.other.count += 1
        self.of_other = self.other.count
        Noted.total += 1
        self.found.append(x.mean().detach())
        self.found[0] += 1


def _noted(self: Layer, x: Tensor) -> None:
    if not hasattr(self, "notes"):
        self.notes = Noted()
    self.notes.note(x)


class Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.teacher.requires_grad_(False)
        self.pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, other in self.pairs:
                own.data = 0.5 * own.data + 0.5 * other.data
                own.mul_(0.99)
            key = self.teacher(x)
        return self.student(x) - key


def layer(before: Callable[[Any, Tensor], None]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), Layer(before), nn.Conv2d(2, 2, 1))


def twice() -> nn.Module:
    one = Layer(_in_place)
    return nn.Sequential(one, nn.ReLU(), one)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Layer(_without_gradients), Layer(_in_place)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x))


def hooked() -> nn.Module:
    """Hooks clamp, keep in a closure's list, and are told of gradients."""
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1))
    own: list[Tensor] = []

    def before(module: Any, inputs: Any) -> None:
        module.weight.data.clamp_(-0.1, 0.1)

    def keep(module: Any, inputs: Any, output: Tensor) -> None:
        own.append(output)
        kept["made"] = output.detach()
        output.register_hook(lambda grad: kept.update(gradient=grad.detach()))

    net[0].register_forward_pre_hook(before)
    net[1].register_forward_hook(keep)
    net.own = own
    return net


def spectral() -> nn.Module:
    one, other = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
    return nn.Sequential(parametrizations.spectral_norm(one), nn.utils.spectral_norm(other))


class Halved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.at = 0

    def forward(self, x: Tensor) -> Tensor:
        self.at += 1
        return x / (1 + self.at)


def parametrized() -> nn.Module:
    one = nn.Conv2d(2, 2, 3, padding=1)
    parametrizing.register_parametrization(one, "weight", Halved())
    return nn.Sequential(one, nn.Conv2d(2, 2, 1))


class Again(nn.Module):
    """Computes again in backward, and counts that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layer(_counted)()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class Stepping(nn.Module):
    """Steps an optimizer of its own in forward, with momentum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.optimizer = torch.optim.SGD(self.conv.parameters(), 0.1, momentum=0.9)

    def forward(self, x: Tensor) -> Tensor:
        if self.conv.weight.grad is not None:
            self.optimizer.step()
        return self.conv(x)


class Books(nn.Module):
    """A codebook that follows what it codes, by a buffer's data; a norm of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.words = nn.Conv2d(2, 4, 3, padding=1), nn.Embedding(6, 4, max_norm=0.5)
        self.register_buffer("book", torch.randn(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).permute(0, 2, 3, 1)
        flat = y.reshape(-1, 4)
        hot = F.one_hot((flat.detach() @ self.book).argmax(1), 6).type(flat.dtype)
        self.book.data.mul_(0.9).add_(flat.detach().transpose(0, 1) @ hot, alpha=0.01)
        return y @ self.book + self.words(torch.arange(6))[:, 0]


class Filled(nn.Module):
    """Gives a plain tensor, into which it has written its results."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        result = torch.zeros(y.shape)
        result[:, :, 2:] = y[:, :, 2:]
        return result


def stepped_in_backward() -> nn.Module:
    net = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 1))
    for parameter in net.parameters():
        optimizer = torch.optim.SGD([parameter], 0.1)
        parameter.register_post_accumulate_grad_hook(lambda _, own=optimizer: own.step())
    return net


numbers = itertools.count()


class Built(nn.Module):
    """Makes, copies and removes modules while it computes, and counts by iterators and arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 3, padding=1)
        self.turns, self.times, self.queue = iter([1, 2, 3]), np.zeros(1), queue.Queue[int]()
        self.cycle, self.pairs_of = itertools.cycle([0.5, 1.0]), enumerate(map(float, iter([1, 2, 3])))
        self.space, self.large = types.SimpleNamespace(calls=0, mean=torch.zeros(())), np.ones(1 << 18)

    def forward(self, x: Tensor) -> Tensor:
        turn = next(self.turns)
        self.times += turn
        self.queue.put(turn)
        self.space.calls += 1
        self.space.mean += next(self.cycle) + sum(next(self.pairs_of)) + next(numbers)
        x = x * (self.space.calls + float(self.space.mean) + float(self.large[0]))
        if turn == 1:
            self.late = nn.Conv2d(2, 2, 1)
        if turn == 3:
            late = self.late
            del self.late
            self.other = nn.Conv2d(2, 2, 1)
            self.other.weight.data = late.weight.data * 0.5
        self.twin = copy.deepcopy(self.first).requires_grad_(False)
        with parametrizing.cached():
            y = self.first(x) * (1 + float(self.times[0]) + self.queue.qsize()) + self.twin(x)
        y = self.other(y) if turn == 3 else self.late(y)
        return y


KINDS: dict[str, Callable[[], nn.Module]] = {
    "data multiplied": layer(_multiply),
    "data in place": layer(_in_place),
    "data assigned": layer(_assigned),
    "data renormed": layer(_renormed),
    "in place without gradients": layer(_without_gradients),
    "copied": layer(_copied),
    "set": layer(_set),
    "swapped": layer(_swapped),
    "by itself": layer(_by_itself),
    "a new parameter": layer(_replaced),
    "a parameter deleted and registered": layer(_registered),
    "latent weights at the parameter": layer(_binarized),
    "by names": layer(_by_name),
    "several at once": layer(_together),
    "by an array": layer(_by_array),
    "counters": layer(_counted),
    "a default argument": lambda: layer(counting())(),
    "queues": layer(_queued),
    "generators": layer(_drawn),
    "an object": layer(_noted),
    "twins": Twins,
    "called twice": twice,
    "tied": Tied,
    "hooks": hooked,
    "spectral norms": spectral,
    "a parametrization that counts": parametrized,
    "computed again": Again,
    "an optimizer in forward": Stepping,
    "an optimizer in backward": stepped_in_backward,
    "a codebook": Books,
    "a plain result": Filled,
    "modules": Built,
}
