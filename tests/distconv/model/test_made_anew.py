"""Models that torch's own tools have changed, or that make their parameters while they run, against one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

import distconv

pytestmark = pytest.mark.gloo


class InOneDnn(nn.Module):
    """Calls layers with tensors in oneDNN's memory layout, as cellpose does on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(inplace=True), nn.Conv2d(3, 8, 3, padding=1))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.to_mkldnn()).to_dense()


class Observed(nn.Module):
    """Is trained as it will be quantized: activations by one observer, weights by one for each filter."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = quantization.QuantStub(), quantization.DeQuantStub()
        self.layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 3, stride=2))
        self.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        quantization.prepare_qat(self.train(), inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.layers(self.enter(x)))


def normed(norm: Callable[[nn.Module], nn.Module]) -> nn.Module:
    """With a weight above the size that a rank gathers within a model, and vectors: one whole, one sharded."""
    layers = nn.Conv2d(3, 128, 3, padding=1), norm(nn.Conv2d(128, 128, 5, padding=2))
    vectors = parametrizations.weight_norm(nn.BatchNorm2d(128)), weight_norm(nn.GroupNorm(8, 128))
    return nn.Sequential(*layers, *vectors, nn.Conv2d(128, 1, 1))


def lazy() -> nn.Module:
    shared = nn.Dropout(0.2), nn.LazyConv2d(4, 3, stride=2), nn.Dropout(0.2), nn.Flatten(), nn.LazyLinear(3)
    return nn.Sequential(nn.LazyConv2d(8, 3, padding=1), nn.LazyBatchNorm2d(), *shared)


def lazy_and_loaded() -> nn.Module:
    made, model = lazy(), lazy()
    made(torch.randn(2, 3, 9, 8))
    model.load_state_dict(made.state_dict())
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "weight norm": lambda: normed(weight_norm),
    "weight norm of each last position": lambda: normed(lambda layer: parametrizations.weight_norm(layer, dim=3)),
    "spectral norm": lambda: normed(parametrizations.spectral_norm),
    "oneDNN's layout": InOneDnn,
    "observers": Observed,
    "lazy": lazy,
    "lazy, and loaded before a call": lazy_and_loaded,
}


def trained(make: Callable[[], nn.Module]) -> list[float]:
    """Losses of two steps, the first of which torch.profiler records, and the sums of all that the model holds."""
    torch.manual_seed(0)
    model = make()
    x = torch.randn(3, 3, 9, 8)
    model(x[:2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses: list[float] = []

    def step() -> None:
        loss = model(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, record_shapes=True, with_stack=True):
        step()
    step()
    with torch.inference_mode():
        losses.append(model.eval()(x[:2]).square().mean().item())  # a sum of both signs would be rounding
    state = [t.double().abs().sum().item() for t in model.state_dict().values() if t.isfinite().all()]
    return losses + state


def compared(partition: str) -> dict[str, tuple[list[float], list[float]]]:
    """Of each model, what is found on ranks and in one process."""
    mesh = distconv.init(partition, device_type="cpu")
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, make in MODELS.items():
            expected = trained(make)
            with distconv.distributed_script(mesh):
                found[name] = trained(make), expected
    return found


@pytest.mark.parametrize("partition", ["channel=2", "height=2"])
def test_training_equals_one_process(ranks: Callable[[int], Ranks], partition: str) -> None:
    for answer in ranks(2).run(compared, partition):
        for name, (found, expected) in answer.items():
            assert found == pytest.approx(expected, rel=2e-5, abs=1e-6), name


def rounded(partition: str) -> Any:
    """x on the grid of an observer of each row, and what the observer keeps."""
    mesh = distconv.init(partition, device_type="cpu")
    x = torch.randn(5, 3, 5, 4)

    def observe(x: Tensor) -> list[Any]:
        kept = [torch.tensor([]) for _ in range(3)] + [torch.tensor([], dtype=torch.int32)]
        on, grid = torch.tensor([1]), (0.1, -128, 127, 0, True, True)
        y = torch.fused_moving_avg_obs_fake_quant(x, on, on, *kept, *grid)  # type: ignore[call-arg]
        return [distconv.gather(y), *kept]

    torch.manual_seed(0)
    return observe(distconv.shard(x, mesh)), observe(x)


def test_an_observer_of_each_row_sees_the_whole_tensor(ranks: Callable[[int], Ranks]) -> None:
    for found, expected in ranks(4).run(rounded, "sample=2,height=2"):
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
