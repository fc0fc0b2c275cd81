"""What parts in turn refuse: in one line, which says what is accepted."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import distconv


def body() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))


class Joint(type("First", (), {}), nn.Conv2d):  # type: ignore[misc]
    """With two bases, each of which has the attributes of an object."""


class Changing(nn.Module):
    """Its parts write different values, or where nothing sees it."""

    def __init__(self, change: Callable[[Any], None]) -> None:
        super().__init__()
        self.conv, self.change, self.at = Joint(2, 2, 3, padding=1), change, 0
        self.memory = self.conv.weight.detach().numpy()
        self.register_buffer("mean", torch.zeros(2))
        self.past, self.kept = [], self.mean.numpy()
        self.large, self.generator = np.zeros(1 << 18), (each for each in range(9))

    def forward(self, x: Tensor) -> Tensor:
        self.change(self)
        return self.conv(x)


def part() -> int:
    return int(threading.current_thread().name.removeprefix("part "))


def differently(self: Any) -> None:
    self.conv.weight.data *= 1 + part()


def count_differently(self: Any) -> None:
    self.at += part()


def write_buffer_differently(self: Any) -> None:
    self.mean.add_(part())


def list_differently(self: Any) -> None:
    self.past.append(torch.ones(2) * part())


def buffer_unseen(self: Any) -> None:
    self.kept += 1


def large_array(self: Any) -> None:
    self.large[(1 << 17) + 3] += 1


def generator(self: Any) -> None:
    next(self.generator)


def another_class(self: Any) -> None:
    self.conv.__class__ = type("Other", (nn.Conv2d,), {})


def base_class(self: Any) -> None:
    self.conv.__class__ = nn.Conv2d


def keep_vector(self: Any) -> None:
    self.vector = nn.utils.parameters_to_vector(self.conv.parameters()).detach().clone()
    nn.utils.vector_to_parameters(self.vector, self.conv.parameters())


@torch.enable_grad()
def backward_within(self: Any) -> None:
    self.conv(torch.ones(1, 2, 6, 6)).sum().backward()


def unseen(self: Any) -> None:
    self.memory[0, 0, 0, 0] += 1


def refused(change: Callable[[Any], None]) -> None:
    model = Changing(change)
    before = model.conv.weight.detach().clone()
    try:
        distconv.in_turn(model, "height=2")(torch.randn(1, 2, 6, 6))
    finally:
        assert change is unseen or torch.equal(model.conv.weight, before)


def kept_elsewhere() -> Tensor:
    found: list[Tensor] = []
    model = Changing(lambda self: None)
    model.conv.register_forward_hook(functools.partial(keep, iter([found])))
    distconv.in_turn(model, "height=2")(torch.randn(1, 2, 6, 6))
    return found[0]


def keep(where: Any, module: Any, args: Any, output: Tensor) -> None:
    for found in where:
        found.append(output)


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "an axis of channels": (lambda: distconv.in_turn(body(), "channel=2"), ValueError, "accepted: axis=parts.*depth"),
    "a size that is none": (
        lambda: distconv.in_turn(body(), "height=2", memory="many"),
        ValueError,
        "'many'",
    ),
    "an unknown axis": (lambda: distconv.in_turn(body(), "hight=2"), ValueError, "did you mean height"),
    "a dim that is not there": (
        lambda: distconv.in_turn(nn.Conv1d(2, 2, 3), "height=2")(torch.randn(1, 2, 8)),
        ValueError,
        "has no height",
    ),
    "a parameter that parts change differently": (
        lambda: refused(differently),
        distconv.UnsupportedOperation,
        "changes conv.weight in its call",
    ),
    "an attribute that parts change differently": (
        lambda: refused(count_differently),
        distconv.UnsupportedOperation,
        "changes Changing.at in its call",
    ),
    "a buffer that parts change differently": (
        lambda: refused(write_buffer_differently),
        distconv.UnsupportedOperation,
        "mean in its call",
    ),
    "a list to which parts add differently": (
        lambda: refused(list_differently),
        distconv.UnsupportedOperation,
        "changes Changing.past in its call",
    ),
    "a buffer that is changed by nothing of torch": (
        lambda: refused(buffer_unseen),
        distconv.UnsupportedOperation,
        "mean in its call",
    ),
    "a large array that is changed": (
        lambda: refused(large_array),
        distconv.UnsupportedOperation,
        "changes Changing.large in its call",
    ),
    "a generator that goes on": (lambda: refused(generator), distconv.UnsupportedOperation, "item of a generator"),
    "a module of another class": (lambda: refused(another_class), distconv.UnsupportedOperation, "another class"),
    "a module of a base's class": (lambda: refused(base_class), distconv.UnsupportedOperation, "another class"),
    "memory of parameters that is kept": (
        lambda: refused(keep_vector),
        distconv.UnsupportedOperation,
        "has been given the memory of a result",
    ),
    "a gradient that is to stay with a result": (
        lambda: refused(lambda self: (self.conv.weight * 1.0).retain_grad()),
        distconv.UnsupportedOperation,
        r"retain_grad\(\) within a model's call",
    ),
    "backward in forward": (
        lambda: refused(backward_within),
        distconv.UnsupportedOperation,
        "gradients of parameters within forward",
    ),
    "a parameter that is changed by nothing of torch": (
        lambda: refused(unseen),
        distconv.UnsupportedOperation,
        "the parameter conv.weight was changed",
    ),
    "a tensor that is kept where nobody looks": (
        lambda: kept_elsewhere().mean(),
        distconv.UnsupportedOperation,
        "has kept is used outside of the call",
    ),
    "results on the host of a step of training": (
        lambda: distconv.in_turn(body(), "height=2", results="host")(torch.ones(1, 4, 6, 6)),
        distconv.UnsupportedOperation,
        "that autograd records; accepted: a call under torch.no_grad",
    ),
    "results that are elsewhere": (
        lambda: distconv.in_turn(body(), "height=2", results="disk"),
        ValueError,
        "accepted is device, host",
    ),
    "second derivatives": (
        lambda: torch.autograd.grad(
            distconv.in_turn(body(), "height=2")(x := torch.randn(2, 4, 6, 6, requires_grad=True)).sum(),
            x,
            create_graph=True,
        ),
        distconv.UnsupportedOperation,
        "create_graph",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_said_in_one_line(name: str) -> None:
    call, error, said = REFUSED[name]
    with pytest.raises(error, match=said) as raised:
        call()
    assert "\n" not in str(raised.value)


class Stopped(Exception):
    pass


def stopped_by_a_hook(model: nn.Module, x: Tensor, stop: type[Exception]) -> tuple[Tensor, dict[str, Tensor]]:
    """A feature that a hook keeps before it ends the call, and the model's state."""
    kept: list[Tensor] = []

    def keep(_: nn.Module, __: Any, feature: Tensor) -> None:
        kept.append(feature)
        raise stop

    handle = model[0].register_forward_hook(keep)  # type: ignore[index]
    with pytest.raises(stop):
        model(x)
    handle.remove()
    (feature,) = kept
    return feature, model.state_dict()


@pytest.mark.parametrize("stop", [Stopped, ValueError, StopIteration])
def test_a_call_that_a_hook_ends_runs_whole(stop: type[Exception]) -> None:
    model, x = nn.Sequential(body(), nn.ReLU()), torch.randn(2, 4, 6, 6)
    feature, state = stopped_by_a_hook(copy.deepcopy(model), x, stop)
    found, own = stopped_by_a_hook(distconv.in_turn(model, "height=2"), x, stop)
    assert torch.equal(found, feature)
    assert all(torch.equal(own[name], value) for name, value in state.items())


def test_graphs_of_calls_that_hooks_end_go_on() -> None:
    model, x, found = nn.Sequential(body(), nn.ReLU()), torch.randn(2, 4, 6, 6), []
    for each in (copy.deepcopy(model), distconv.in_turn(model, "height=2")):
        features = [stopped_by_a_hook(each, x, Stopped)[0] for _ in range(2)]
        sum(feature.square().sum() for feature in features).backward()  # type: ignore[union-attr]
        found.append([p.grad for p in each.parameters()])
    torch.testing.assert_close(*found)


def test_an_error_of_torch_stays() -> None:
    model = distconv.in_turn(nn.Sequential(body(), nn.Linear(5, 2)), "height=2")
    with pytest.raises(RuntimeError, match="shapes"):
        model(torch.randn(2, 4, 6, 6))
