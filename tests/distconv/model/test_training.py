"""What training scripts do around their steps, against the same script in one process."""

from __future__ import annotations

import copy
import functools
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import TRAIN, launch
from ranks import Ranks
from small_training import Result, batches, net
from tagged import classes_of_a_subclass, subclasses
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import distconv
from distconv.model.parallelize import distributed_script

PARTITIONS = ["sample=2,height=2", "sample=2,channel=2"]


def ema(first: str, **options: Any) -> Result:
    """Three steps with a moving average; the average is made before or after the model's first call."""
    model, found, average = net(), [], None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def averaged() -> AveragedModel:
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7), **options)

    if first == "average":
        average = averaged()
    data = batches()
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average = average or averaged()
        average.update_parameters(model)
        found.append(loss.item())
    assert average is not None
    if not options:
        update_bn([x for x, _ in data], average)
    average.eval()
    with torch.no_grad():
        found.append(nn.functional.mse_loss(average(data[0][0]), data[0][1]).item())
    kept = io.BytesIO()
    torch.save(average.state_dict(), kept)
    kept.seek(0)
    state = torch.load(kept)
    assert all(type(value) is Tensor for value in state.values())
    other = AveragedModel(net())
    other.load_state_dict(state)
    return [*found, *state.values()]


def plain_average() -> Result:
    """AveragedModel's own, equal average of all steps."""
    model, found = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    average = AveragedModel(model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        found.append(loss.item())
    return [*found, *average.module.parameters()]


def written_by_hand(first: bool, update: Callable[[Tensor, Tensor], Any]) -> Result:
    """A moving average as scripts write it, over a copy of the model."""
    model, found, average = net(), [], None
    if first:
        average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average = average or copy.deepcopy(model).requires_grad_(False)
        with torch.no_grad():
            for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                update(kept, new)
            found.append(nn.functional.mse_loss(average.eval()(x), y).item())
    assert average is not None
    return [*found, *average.parameters()]


UPDATES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mul_ and add_": lambda kept, new: kept.mul_(0.9).add_(new, alpha=0.1),
    "lerp_": lambda kept, new: kept.lerp_(new, 0.1),
    "copy_": lambda kept, new: kept.copy_(0.9 * kept + 0.1 * new),
    "data": lambda kept, new: kept.data.copy_(0.9 * kept.data + (1 - 0.9) * new.data),
}


def accumulated() -> Result:
    """Two steps of three micro-batches, clipped."""
    model, found = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        for x, y in batches():
            loss = nn.functional.mse_loss(model(x), y) / 3
            loss.backward()
            found.append(loss.item())
        found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
    return [*found, *model.parameters()]


def clipped_by_value() -> Result:
    model, found = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        found.append(loss.item())
    return [*found, *model.parameters()]


def scaled(overflow: bool = False) -> Result:
    """A GradScaler; with `overflow` one sample of the second step makes a gradient that is not finite."""
    model, found = net(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step, (x, y) in enumerate(batches()):
        optimizer.zero_grad()
        if overflow and step == 1:
            y[4, :, 8] = float("inf")
        loss = nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return [*found, *model.parameters()]


def evaluated_first() -> Result:
    """The first call of a model, and that of its average, under inference mode; both load a state and train on."""
    model, found = nn.Sequential(net(), nn.AvgPool2d(2), nn.Upsample(scale_factor=2.0, mode="bilinear")), []
    average = AveragedModel(model)
    data = [(x[..., :8, :], y[..., :8, :]) for x, y in batches()]
    with torch.inference_mode():
        found += [nn.functional.mse_loss(each(data[0][0]), data[0][1]).item() for each in (model, average)]
    average.load_state_dict(average.state_dict())
    model.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        found.append(loss.item())
    return [*found, *average.module.parameters()]


def flat(before: bool) -> Result:
    """LBFGS, made before the model's first call or after."""
    model = net()
    (x, y), *_ = batches()
    if not before:
        model(x)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        return loss.detach()

    return [float(optimizer.step(closure)), float(optimizer.step(closure))]  # type: ignore[arg-type]


def gradients_in_one_buffer(before: bool) -> Result:
    """Gradients are views of one buffer from before the model's first call on, or from after it."""
    model, found = net(), []
    (x, y), *_ = batches()
    if not before:
        model(x)
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    first = 0
    for parameter in model.parameters():
        parameter.grad = buffer[first : first + parameter.numel()].view_as(parameter)
        first += parameter.numel()
    for _ in range(2):
        buffer.zero_()
        nn.functional.mse_loss(model(x), y).backward()
        found.append(buffer.clone())
    return [*found, *(p.grad for p in model.parameters())]


KINDS: dict[str, Callable[[], Result]] = {
    "ema made first": lambda: ema("average"),
    "ema made after the first step": lambda: ema("model"),
    "ema with buffers, made first": lambda: ema("average", use_buffers=True),
    "ema with buffers, made after the first step": lambda: ema("model", use_buffers=True),
    "equal average": plain_average,
    **{
        f"average by {name}, made {'first' if first else 'later'}": functools.partial(written_by_hand, first, update)
        for name, update in UPDATES.items()
        for first in (True, False)
    },
    "accumulated and clipped": accumulated,
    "gradients in one buffer": lambda: gradients_in_one_buffer(True),
    "gradients in one buffer later": lambda: gradients_in_one_buffer(False),
    "clipped by value": clipped_by_value,
    "scaled": scaled,
    "scaled, with an overflow": lambda: scaled(overflow=True),
    "subclasses": subclasses,
    "classes of a subclass": classes_of_a_subclass,
    "evaluated first": evaluated_first,
}


def differences(partition: str) -> dict[str, float]:
    """{kind: the largest difference from one process}."""
    mesh = distconv.init(partition, device_type="cpu")
    found: dict[str, float] = {}
    for kind, run in KINDS.items():
        expected = run()
        try:
            with distributed_script(mesh):
                result = distconv.whole_state([x.detach() if isinstance(x, Tensor) else x for x in run()])
        except Exception as error:
            error.add_note(f"in {kind!r}")
            raise
        assert len(result) == len(expected)
        found[kind] = max(_difference(a, b) for a, b in zip(result, expected, strict=True))
    return found


def _difference(found: Any, expected: Any) -> float:
    found, expected = (torch.as_tensor(each, dtype=torch.float64).detach() for each in (found, expected))
    if not torch.equal(found.isfinite(), expected.isfinite()):
        return math.inf
    return float((found - expected).nan_to_num(0.0).abs().max())


@pytest.mark.parametrize("partition", PARTITIONS)
def test_as_in_one_process(ranks: Callable[[int], Ranks], partition: str) -> None:
    for found in ranks(4).run(differences, partition):
        assert not {kind: error for kind, error in found.items() if not error < 1e-11}


def of_a_flat_optimizer(partition: str, before: bool) -> float:
    mesh = distconv.init(partition, device_type="cpu")
    expected = flat(before)
    with distributed_script(mesh):
        found = flat(before)
    return max(_difference(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("partition", PARTITIONS[:2])
def test_lbfgs(ranks: Callable[[int], Ranks], partition: str, before: bool) -> None:
    assert max(ranks(4).run(of_a_flat_optimizer, partition, before)) < 1e-11


@pytest.mark.parametrize("partition", ["sample=2,height=2", "channel=2,filter=2"])
def test_nothing_but_the_scripts_own_output_is_printed(partition: str) -> None:
    done = launch(
        "alone", 4, "--partition", partition, TRAIN, "--epochs=1", PYTHONWARNINGS="error,ignore::ResourceWarning"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) == 3
