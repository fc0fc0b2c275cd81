"""What is computed once more in backward reads what forward has read, whatever the program has changed since."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import distconv
from distconv.fitting.retention import computed_again
from distconv.fitting.ways import AGAIN
from distconv.turns.turning import turn
from tests.distconv.fitting.test_changed_state import OneWay


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.scale = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), 0.5

    def forward(self, x: Tensor) -> Tensor:
        h = functional.silu(self.norm(self.conv(x))) * self.scale
        pixels = h.flatten(2).transpose(1, 2)[:, :32].unsqueeze(1)
        return h + functional.scaled_dot_product_attention(pixels, pixels, pixels).mean((1, 2))[..., None, None]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Block() for _ in range(3)), nn.Conv2d(8, 3, 1)).double()


def no_longer_trained(net: nn.Sequential) -> None:
    net[1].requires_grad_(False)


def evaluated(net: nn.Sequential) -> None:
    net.eval()


def scaled(net: nn.Sequential) -> None:
    for block in net[1:4]:
        block.scale += 0.3


def replaced(net: nn.Sequential) -> None:
    net[2].conv = nn.Conv2d(8, 8, 3, padding=1)


def given_another_weight(net: nn.Sequential) -> None:
    net[1].conv.weight = nn.Parameter(torch.zeros(8, 8, 3, 3, dtype=torch.float64))


def within(how: str | None) -> nn.Sequential:
    net = network()
    return net if how is None else turn(net, (OneWay(how), None), None, "distconv.fit")


@pytest.mark.parametrize("change", [no_longer_trained, evaluated, scaled, replaced, given_another_weight])
def test_a_change_between_forward_and_backward_changes_no_gradient(change: Callable[[nn.Sequential], None]) -> None:
    found = []
    for how in (None, AGAIN):
        net, x = within(how), torch.randn(2, 3, 48, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        parameters, loss = [*net.parameters()], net(x).square().mean()
        change(net)
        state = {name: value for name, value in vars(net[1]).items() if name in ("scale", "training")}
        loss.backward()
        assert state == {name: vars(net[1])[name] for name in state}
        found.append([loss.detach(), *(p.grad for p in parameters), *net.state_dict().values()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("names", ["parameters", "parameters and buffers"])
def test_parameters_of_functional_call(names: str) -> None:
    found = []
    for how in (None, AGAIN):
        net, x = within(how), torch.randn(2, 3, 48, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        given = {name: (1.3 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
        buffers = {name: b.clone() for name, b in net.named_buffers()} if "buffers" in names else {}
        loss = functional_call(net, {**given, **buffers}, (x,)).square().mean()
        found.append([loss, *torch.autograd.grad(loss, [*given.values()]), *buffers.values(), *net.buffers()])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


def test_the_kernel_of_attention_is_that_of_forward() -> None:
    found = []
    for how in (None, AGAIN):
        net, x = within(how), torch.randn(2, 3, 48, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        with sdpa_kernel(SDPBackend.MATH):
            loss = net(x).square().mean()
        loss.backward()
        assert torch.backends.cuda.flash_sdp_enabled()
        found.append([loss.detach(), *(p.grad for p in net.parameters())])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)


class Behind(nn.Module):
    """Changes a weight or a buffer behind autograd's back."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.conv, self.what = nn.Conv2d(8, 8, 3, padding=1), what
        self.register_buffer("mean", torch.zeros(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "weight":
            self.conv.weight.data.mul_(0.9)
        elif self.what == "new weight":
            self.conv.weight.data = self.conv.weight.data * 0.9
        elif self.what == "new buffer":
            self.mean.data = 0.5 * self.mean.data + x.detach().mean()
        else:
            self.mean.data.mul_(0.5).add_(x.detach().mean())
        y = functional.silu(self.conv(x) + self.mean.clone())
        return torch.sigmoid(y) * y


@pytest.mark.parametrize("what", ["weight", "buffer", "new weight", "new buffer"])
def test_what_is_written_behind_autograd_is_written_once(what: str) -> None:
    found = []
    for how in (None, AGAIN):
        torch.manual_seed(0)
        between = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.SiLU()) for _ in range(2))
        net = nn.Sequential(nn.Conv2d(3, 8, 1), Behind(what), *between, Behind(what)).double()
        if how is not None:
            turn(net, (OneWay(how), None), None, "distconv.fit")
        for _ in range(2):
            loss = net(torch.randn(2, 3, 48, 32, dtype=torch.float64)).square().mean()
            loss.backward()
            found.append([loss.detach(), *(p.grad.clone() for p in net.parameters()), *net.state_dict().values()])
    for expected, each in zip(found[:2], found[2:], strict=True):
        torch.testing.assert_close(each, expected, rtol=1e-9, atol=1e-12)


class Critic(nn.Module):
    """With statistics, random numbers and a result in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Softplus(), nn.Conv2d(8, 1, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layers(x)
        return {"unused": x.sum(), "scores": functional.dropout(y, 0.2)}


def penalized(how: str | None) -> list[Any]:
    """Two steps with a penalty of the gradient by the input, and one of the gradients by parameters."""
    torch.manual_seed(0)
    critic: nn.Module = Critic().double()
    if how is not None:
        turn(critic, (OneWay(how), None), None, "distconv.fit")
    found: list[Any] = []
    for _ in range(2):
        x = torch.randn(2, 3, 24, 20, dtype=torch.float64).requires_grad_()
        scores = critic(x)["scores"]
        (by_input,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
        loss = scores.mean() + (by_input.flatten(1).norm(dim=1) - 1).square().mean()
        by_parameters = torch.autograd.grad(loss, [*critic.parameters()], create_graph=True)
        sum(grad.square().sum() for grad in by_parameters).backward()
        found += [loss.detach(), x.grad, *(p.grad for p in critic.parameters()), *critic.buffers(), torch.rand(())]
        critic.zero_grad()
    return [None if x is None else x.clone() for x in found]


def test_gradients_of_gradients_of_a_call_in_parts(capsys: pytest.CaptureFixture[str]) -> None:
    expected, found = penalized(None), penalized("parts")
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-11)
    assert capsys.readouterr().err.count("Critic is computed once more, whole, as gradients of its gradients") == 1


def test_parts_that_cannot_be_computed_again_refuse_gradients_of_gradients() -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Softplus()).double()
    distconv.in_turn(net, "height=2")
    x = torch.randn(2, 3, 24, 20, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="a gradient of a gradient"):
        torch.autograd.grad(net(x).square().sum(), x, create_graph=True)


def test_arguments_that_are_one_tensor_are_one_when_they_are_computed_again() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True).double()
    found = []
    for again in (False, True):
        attention.zero_grad()
        given = torch.linspace(-1, 1, 48).double().view(2, 3, 8).requires_grad_()
        x = given * 2  # three arguments, which attention projects together where they are one tensor
        result = computed_again(attention, [attention], [], (x, x, x), {}) if again else attention(x, x, x)
        result[0].square().sum().backward()
        found.append([given.grad, *(p.grad.clone() for p in attention.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


TEMPERATURE = 1.0


class Settings:
    """An object of the program, with what a block reads in various places."""

    temperature = 1.0

    def __init__(self) -> None:
        self.own, self.listed, self.array, self.named = 1.0, [1.0], np.ones(2), {"temperature": torch.ones(())}


def of_global(settings: Settings, value: float | None) -> Any:
    global TEMPERATURE
    TEMPERATURE = TEMPERATURE if value is None else value
    return TEMPERATURE


def of_class(settings: Settings, value: float | None) -> Any:
    Settings.temperature = Settings.temperature if value is None else value
    return Settings.temperature


def of_object(settings: Settings, value: float | None) -> Any:
    settings.own = settings.own if value is None else value
    return settings.own


def of_list(settings: Settings, value: float | None) -> Any:
    settings.listed += [] if value is None else [value]
    return settings.listed[-1]


def of_array(settings: Settings, value: float | None) -> Any:
    settings.array[0] = settings.array[0] if value is None else value
    return float(settings.array[0])


def of_dict(settings: Settings, value: float | None) -> Any:
    if value is not None:
        settings.named["temperature"] = torch.tensor(value)
    return settings.named["temperature"]


def of_global_read(settings: Settings, value: float | None) -> Any:
    """As `of_global`, but the block reads the variable by a function that does not write it."""
    return temperature() if value is None else of_global(settings, value)


def temperature() -> float:
    return TEMPERATURE


class Heated(nn.Module):
    """A block that reads a temperature, which it does not change."""

    def __init__(self, read: Callable[[Settings, float | None], Any], settings: Settings) -> None:
        super().__init__()
        self.conv, self.read = nn.Conv2d(8, 8, 3, padding=1), lambda: read(settings, None)
        self.read = temperature if read is of_global_read else self.read

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.conv(x))
        return torch.sigmoid(y * self.read()) * y


class Heating(nn.Module):
    """Changes the temperature before each block."""

    def __init__(self, change: Callable[[Settings, float | None], Any]) -> None:
        super().__init__()
        self.settings, self.change = Settings(), change
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1)
        self.blocks = nn.ModuleList(Heated(change, self.settings) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            self.change(self.settings, 1.0 + number)
            x = block(x)
        return self.last(x)


@pytest.mark.parametrize("change", [of_global, of_global_read, of_class, of_object, of_list, of_array, of_dict])
def test_what_changes_between_blocks_changes_no_gradient(change: Callable[[Settings, float | None], Any]) -> None:
    found = []
    for how in (None, AGAIN):
        torch.manual_seed(0)
        net, x = Heating(change).double(), torch.randn(2, 3, 48, 32, dtype=torch.float64)
        if how is not None:
            turn(net, (OneWay(how), None), None, "distconv.fit")
        loss = net(x).square().mean()
        change(net.settings, 7.0)
        loss.backward()
        found.append([loss.detach(), torch.as_tensor(change(net.settings, None)), *(p.grad for p in net.parameters())])
        change(net.settings, 1.0)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-12)
