"""A recurrent layer in turn: one part computes for all, and each has memory of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import distconv
from distconv.rules.operands import once
from distconv.rules.products import recurrent
from distconv.turns import pager

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM of two directions": lambda: nn.LSTM(8, 6, bidirectional=True),
    "GRU, samples first": lambda: nn.GRU(8, 6, num_layers=2, batch_first=True),
    "RNN": lambda: nn.RNN(8, 6, nonlinearity="relu", bias=False),
}


class Recurrent(nn.Module):
    """A recurrent layer, called twice, whose states and results are written to."""

    def __init__(self, layer: nn.RNNBase, again: bool) -> None:
        super().__init__()
        self.first, self.layer, self.again = nn.Conv1d(2, 8, 3, padding=1), layer, again

    def forward(self, x: Tensor) -> Tensor:
        order = (0, 2, 1) if self.layer.batch_first else (2, 0, 1)
        x = self.first(x).permute(order)
        y, state = checkpoint(self.layer, x, use_reentrant=False) if self.again else self.layer(x)
        last = state[0] if isinstance(state, tuple) else state
        other, _ = self.layer(x.flip(1 if self.layer.batch_first else 0))
        return y.mul_(2) + other + last.mul_(3).sum()


class Packed(nn.Module):
    """A recurrent layer over what a convolution makes of samples of several lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv1d(2, 8, 3, padding=1), nn.GRU(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = pack_padded_sequence(self.first(x).transpose(1, 2), torch.tensor([9, 4, 6]), True, enforce_sorted=False)
        packed, state = self.layer(y)
        return pad_packed_sequence(packed, True)[0] + state.sum()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many elements as functions are computed once for all parts from now on."""
    calls: list[int] = []
    forward = once._Call.forward

    def counting(self: once._Call, tensors: list[Tensor]) -> object:
        calls.append(len(tensors))
        return forward(self, tensors)

    monkeypatch.setattr(once._Call, "forward", counting)
    return calls


@pytest.mark.parametrize("memory", [None, "1KiB"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "computed again"])
@pytest.mark.parametrize("samples", [1, 4])
@pytest.mark.parametrize("name", LAYERS)
def test_a_recurrent_layer_is_computed_once(
    name: str, samples: int, again: bool, memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, calls = [], counted(monkeypatch)
    for parts in (None, "width=4"):
        torch.manual_seed(4)
        net, x = Recurrent(LAYERS[name](), again).double(), torch.randn(samples, 2, 9).double().requires_grad_()
        if parts is not None:
            distconv.in_turn(net, parts, memory=memory)
        y = net(x)
        weights = torch.linspace(-1, 1, y.numel()).double().view_as(y)
        y.mul(weights).sum().backward(retain_graph=True)
        first = [p.grad.clone() for p in net.parameters()]
        y.square().mean().backward()
        with torch.no_grad():
            evaluated = net(x)
        found.append([y.detach(), evaluated, x.grad, *first, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    assert len(calls) == 4 - again  # of two layers, recorded and not; each part computes what is in a checkpoint


def test_packed_sequences_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = [], counted(monkeypatch)
    for parts in (None, "width=3"):
        torch.manual_seed(4)
        net, x = Packed().double(), torch.randn(3, 2, 9).double().requires_grad_()
        y = net(x) if parts is None else distconv.in_turn(net, parts)(x)
        y.square().mean().backward()
        found.append([y.detach(), x.grad, *(p.grad for p in net.parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-10, atol=1e-12)
    assert len(calls) == 3  # packed, computed and padded


@pytest.mark.parametrize("parts", ["width=2", "sample=2"])
def test_a_recurrent_layer_is_one_operator_within_a_limit(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[object] = []
    begin = pager.Pager.begin
    monkeypatch.setattr(pager.Pager, "begin", lambda *given: begun.append(given) or begin(*given))
    counts = []
    for time in (8, 64):
        net = distconv.in_turn(Recurrent(nn.LSTM(8, 6), again=False), parts, memory="1KiB")
        begun.clear()
        net(torch.randn(2, 2, time)).sum().backward()
        counts.append(len(begun))
    assert 0 < counts[1] < 2 * counts[0]


@pytest.mark.parametrize("samples_first", [False, True])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_is_not_trained_runs_a_stretch_of_time_at_a_time(
    layer: type[nn.RNNBase], samples_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = []
    of_torch = recurrent.operator

    def operator(name: str) -> Callable[..., Any]:
        def call(x: Tensor, *rest: Any) -> Any:
            lengths.append(x.shape[1 if samples_first else 0])
            return of_torch(name)(x, *rest)

        return call

    monkeypatch.setattr(recurrent, "GATES", 24 * 8 * 2 * 3 + 1)  # of three positions and a bit, of an LSTM
    monkeypatch.setattr(recurrent, "operator", operator)
    plain = Recurrent(layer(8, 6, num_layers=2, batch_first=samples_first), again=False).double()
    net = distconv.in_turn(copy.deepcopy(plain), "width=2")
    x = torch.randn(2, 2, 20).double()
    with torch.no_grad():
        torch.testing.assert_close(net(x), plain(x), rtol=1e-12, atol=1e-12)
    assert lengths and max(lengths) < 20
    torch.testing.assert_close(*(each(x).sum() for each in (net, plain)), rtol=1e-12, atol=1e-12)


def test_a_weight_that_was_changed_is_noticed_within_a_limit() -> None:
    net = distconv.in_turn(Recurrent(nn.LSTM(8, 6), again=False), "width=2", memory="1KiB")
    y = net(torch.randn(1, 2, 8))
    with torch.no_grad():
        net.layer.weight_ih_l0.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
