"""Layers that take their direct path at once: what a program has put around or in place of torch's code is called."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

import distconv
from mucudnn.process import substituted

pytestmark = pytest.mark.gloo

Way = Callable[[Any], contextlib.AbstractContextManager[Any]]


class Doubled(nn.Conv2d):
    """A program's own layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


class Doubling(TorchFunctionMode):
    """A program's own mode."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return 2 * result if func is torch.conv2d else result


def doubled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def hook(_: nn.Module, __: Any, result: Tensor) -> Tensor:
    return 2 * result


def on_layer(conv: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.closing(types.SimpleNamespace(close=conv.register_forward_hook(hook).remove))


def on_all_layers(_: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.closing(types.SimpleNamespace(close=register_module_forward_hook(hook).remove))


@contextlib.contextmanager
def method_of_layer(conv: Any) -> Iterator[None]:
    conv._conv_forward = doubled(conv._conv_forward)
    yield


@contextlib.contextmanager
def attribute(conv: Any) -> Iterator[None]:
    weight = conv.weight.detach() * 2
    del conv.weight
    conv.weight = weight
    yield


WAYS: dict[str, Way] = {
    "hook": on_layer,
    "hook of all": on_all_layers,
    "mode": lambda _: Doubling(),
    "method": method_of_layer,
    "method of the class": lambda _: substituted(nn.Conv2d, forward=doubled(nn.Conv2d.forward)),
    "function": lambda _: substituted(F, conv2d=doubled(F.conv2d)),
    "attribute": attribute,
}


def network(kind: type[nn.Conv2d]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()


def differences() -> dict[str, str]:
    """Of each way a program may take part, where ranks compute otherwise than one process; and layers at once."""
    found: dict[str, str] = {}
    torch.manual_seed(1)
    mesh, x = distconv.init("height=2", device_type="cpu"), torch.randn(2, 3, 7, 6, dtype=torch.float64)
    ways: list[tuple[str, type[nn.Conv2d], Way]] = [(name, nn.Conv2d, way) for name, way in WAYS.items()]
    nothing: Way = lambda _: contextlib.nullcontext()  # noqa: E731
    for name, kind, way in (*ways, ("class", Doubled, nothing), ("none", nn.Conv2d, nothing)):
        taken: list[Any] = []

        def counting(*given: Any, stock: Any = distconv.model.calls._layer_result, taken: list[Any] = taken) -> Any:
            taken.append(stock(*given))
            return taken[-1]

        plain, here = network(kind), distconv.parallelize(network(kind), mesh)
        with way(plain[0]):
            expected = plain(x)
        with way(here[0]), substituted(distconv.model.calls, _layer_result=counting):
            y = distconv.gather(here(x))
        at_once = [False] * (kind is Doubled) + [each is not NotImplemented for each in taken]
        if not torch.allclose(y, expected, rtol=1e-12) or at_once[1:2] != [name not in ("mode", "hook of all")]:
            found[name] = f"{float((y - expected).detach().abs().max())}, at once: {at_once}"
        if at_once[:1] != [name == "none"] or int(here[1].num_batches_tracked) != 1:
            found[name] = f"at once: {at_once}, {int(here[1].num_batches_tracked)} batches"
    return found


def test_what_a_program_puts_around_layers_is_called(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(differences) == [{}, {}]


def passed() -> tuple[int, int]:
    """How many functions of the packages one convolution with a halo passes, and in how many files."""
    passed: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        file = frame.f_code.co_filename
        if event == "call" and ("/distconv/" in file or "/mucudnn/" in file) and "/tests/" not in file:
            passed.append(file)

    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.layer(self.layer(x))
            sys.setprofile(note)
            x = self.layer(x)
            sys.setprofile(None)
            return x

    torch.manual_seed(1)
    model = distconv.parallelize(Thrice(), distconv.init("height=2", device_type="cpu"))
    for _ in range(2):
        passed.clear()
        model(torch.randn(2, 4, 8, 8))
    return len(passed), len(set(passed))


def test_a_convolution_passes_few_functions(ranks: Callable[[int], Ranks]) -> None:
    for calls, files in ranks(2).run(passed):
        assert 0 < calls <= 40 and files <= 12
