"""Recurrent layers, each in one call of torch's own for the samples of a rank, as in one process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import distconv

pytestmark = pytest.mark.gloo

LAYERS: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM of two directions": lambda: nn.LSTM(8, 6, bidirectional=True),
    "LSTM with projections": lambda: nn.LSTM(8, 6, proj_size=4, batch_first=True),
    "LSTM with dropout": lambda: nn.LSTM(8, 6, num_layers=2, dropout=0.3),
    "GRU of two layers": lambda: nn.GRU(8, 6, num_layers=2, batch_first=True),
    "RNN": lambda: nn.RNN(8, 6, nonlinearity="relu", bias=False),
}


class Recurrent(nn.Module):
    """A recurrent layer over the positions of a convolution."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv1d(2, 8, 3, padding=1), layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        order = (0, 2, 1) if self.layer.batch_first else (2, 0, 1)
        y, state = self.layer(self.first(x).permute(order))
        return y.sin(), state[0] if isinstance(state, tuple) else state


def numbers(partition: str | None, samples: int) -> dict[str, list[Tensor]]:
    """By layer: the results of a step, and the gradients; of the last one in float32 a large evaluation, too."""
    mesh = None if partition is None else distconv.init(partition, device_type="cpu")
    found = {}
    for name, make in LAYERS.items():
        torch.manual_seed(4)
        net, x = Recurrent(make()), torch.randn(samples, 2, 9).double()
        if mesh is not None:
            distconv.parallelize(net, mesh)
        net.double()
        y, state = net(x)
        grads = torch.autograd.grad(y.square().mean() + state.square().mean(), list(net.parameters()))
        found[name] = distconv.whole_state([y.detach(), state.detach(), *grads])
    with torch.no_grad():
        found["evaluation"] = distconv.whole_state([net.float()(torch.randn(samples, 2, 40000))[0].double().mean()])
    return found


@pytest.mark.parametrize("partition", ["sample=2", "width=2", "channel=2"])
def test_recurrent_layers_equal_one_process(ranks: Callable[[int], Ranks], partition: str) -> None:
    for samples in (1, 3):
        alone = numbers(None, samples)
        for found in ranks(2).run(numbers, partition, samples):
            evaluated = found.pop("evaluation"), alone["evaluation"]
            torch.testing.assert_close(*evaluated, rtol=1e-5, atol=1e-6)
            for name, given in found.items():
                torch.testing.assert_close(given, alone[name], rtol=1e-9, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")


class Packed(nn.Module):
    """A recurrent layer over what a convolution makes of samples of several lengths."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv1d(2, 8, 3, padding=1), layer

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        first = self.layer.batch_first
        y = self.first(x).permute((0, 2, 1) if first else (2, 0, 1))
        packed, state = self.layer(pack_padded_sequence(y, lengths, first, enforce_sorted=False))
        padded, counts = pad_packed_sequence(packed, first, padding_value=0.5, total_length=10)
        return padded.sin(), state[0] if isinstance(state, tuple) else state, packed.data * 2, counts.double()


def packed_numbers(partition: str | None, is_split: bool) -> list[Tensor]:
    """The results of a step with each layer, and its gradients."""
    mesh = None if partition is None else distconv.init(partition, device_type="cpu")
    found = []
    for make in LAYERS.values():
        torch.manual_seed(4)
        net, x = Packed(make()).double(), torch.randn(3, 2, 9).double().requires_grad_()
        lengths = torch.tensor([4, 9, 7])
        if mesh is not None:
            distconv.parallelize(net, mesh)
            lengths = distconv.shard(lengths, mesh) if is_split else lengths
        results = net(x, lengths)
        grads = torch.autograd.grad(sum(y.square().mean() for y in results), [x, *net.parameters()])
        found += distconv.whole_state([*(y.detach() for y in results), *grads])
    return found


@pytest.mark.parametrize(("partition", "is_split"), [("sample=2", True), ("width=2", False), ("channel=2", False)])
def test_packed_sequences_equal_one_process(ranks: Callable[[int], Ranks], partition: str, is_split: bool) -> None:
    for found in ranks(2).run(packed_numbers, partition, is_split):
        torch.testing.assert_close(found, packed_numbers(None, False), rtol=1e-9, atol=1e-11)
