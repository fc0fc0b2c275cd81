"""Whole networks, trained in float64 for three steps: every loss and every gradient equal those of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor

import distconv
from benchmarks.networks import NETWORKS
from distconv.model.strategy import Strategy

Steps = list[tuple[float, dict[str, Tensor]]]

IMAGES = ("resnet18", "resnet50", "vgg16", "meshtangling1k")
VOLUMES = ("unet3d", "unet3d, group norm", "cosmoflow")
PLANES = {
    2: ("sample=2", "height=2", "width=2"),
    4: ("sample=4", "height=4", "width=4", "sample=2,height=2", "width=2,sample=2", "height=2,width=2"),
}
SPACES = {
    2: ("sample=2", "depth=2", "height=2", "width=2"),
    4: ("sample=4", "depth=4", "sample=2,depth=2", "depth=2,height=2", "height=2,width=2", "width=4"),
}
CHANNELS = {2: ("channel=2",), 4: ("channel=4", "sample=2,channel=2", "channel=2,filter=2", "channel=2,height=2")}
STRATEGIES = {
    "resnet18": {"stem": "height=4", "stages.[01]": "sample=2,channel=2", "stages.*": "channel=4", "*": "sample=4"},
    "wide_resnet50": {"stages.1.*.0": "channel=2,filter=2", "stages.1": "channel=4", "*": "sample=2,height=2"},
    "vgg16": {"features.*": "height=2,width=2", "classifier": "channel=4"},
    "unet3d": {"analysis.1*": "channel=4", "synthesis": "depth=2,height=2", "*": "sample=2,width=2"},
    "cosmoflow": {"features": "depth=2,channel=2", "*": "channel=2,filter=2"},
}
RATE = 1e-4


def three_steps(name: str) -> Steps:
    """(loss, gradients) of each step, as a plain script would train."""
    network = NETWORKS[name.partition(",")[0]].small()
    torch.manual_seed(0)
    model = network.build(**({"norm": "group", "groups": 2} if "group" in name else {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    steps = []
    for step in range(3):
        inputs, targets = network.sample(network.batch, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = network.loss(model(inputs), targets)
        loss.backward()
        gradients = {key: distconv.whole_state(p.grad) for key, p in model.named_parameters()}
        assert all(type(gradient) is Tensor for gradient in gradients.values())
        steps.append((loss.item(), {key: gradient.clone() for key, gradient in gradients.items()}))
        optimizer.step()
    return steps


@functools.cache
def alone(name: str) -> Steps:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return three_steps(name)
    finally:
        torch.set_num_threads(threads)


def differences(name: str, partition: str, expected: Steps, strategy: dict[str, str] | None = None) -> dict[str, float]:
    """The relative error of each loss, and of each step's worst gradient.

    One of nothing but rounding errors, as of a bias before batch norm, is measured against the network's largest.
    """
    parsed = None if strategy is None else Strategy.parse(strategy)
    with distconv.distributed_script(distconv.init(partition, device_type="cpu"), parsed):
        found = three_steps(name)
    result: dict[str, float] = {}
    for step, ((loss, gradients), (right, whole)) in enumerate(zip(found, expected, strict=True)):
        result[f"loss {step}"] = abs(loss - right) / abs(right)
        largest = max(float(gradient.abs().max()) for gradient in whole.values())
        for key, gradient in whole.items():
            scale = float(gradient.abs().max())
            error = float((gradients[key] - gradient).abs().max()) / (scale if scale > 1e-12 * largest else largest)
            if not error <= 1e-9:
                result[f"step {step}: {key}"] = error
    return result


def check(answers: list[Any]) -> None:
    for rank, found in enumerate(answers):
        assert not {what: error for what, error in found.items() if not error <= 1e-9}, f"rank {rank}"


def cases(networks: tuple[str, ...], partitions: dict[int, tuple[str, ...]]) -> list[tuple[str, int, str]]:
    return [(name, size, text) for name in networks for size, texts in partitions.items() for text in texts]


@pytest.mark.parametrize(
    "name, size, partition",
    [*cases(IMAGES, PLANES), ("wide_resnet50", 4, "sample=2,height=2"), *cases(VOLUMES, SPACES)],
)
def test_training_equals_one_process(ranks: Callable[[int], Ranks], name: str, size: int, partition: str) -> None:
    pool = ranks(size)
    if pool.backend == "mpi" and partition not in ("sample=2", "sample=2,height=2", "depth=2,height=2"):
        pytest.skip("over Gloo")
    check(pool.run(differences, name, partition, alone(name)))


@pytest.mark.parametrize(
    "name, size, partition",
    [
        *cases(("resnet18",), CHANNELS),
        ("wide_resnet50", 4, "sample=2,channel=2"),
        *cases(("vgg16", "meshtangling1k", "unet3d", "unet3d, group norm", "cosmoflow"), {4: ("channel=4",)}),
    ],
)
def test_split_channels_train_as_one_process(
    ranks: Callable[[int], Ranks], name: str, size: int, partition: str
) -> None:
    pool = ranks(size)
    if pool.backend == "mpi" and (name, partition) not in (
        ("resnet18", "channel=2,filter=2"),
        ("cosmoflow", "channel=4"),
    ):
        pytest.skip("over Gloo")
    check(pool.run(differences, name, partition, alone(name)))


@pytest.mark.parametrize("name", STRATEGIES)
def test_layers_of_several_partitions_train_as_one_process(ranks: Callable[[int], Ranks], name: str) -> None:
    pool = ranks(4)
    if pool.backend == "mpi" and name not in ("resnet18", "cosmoflow"):
        pytest.skip("over Gloo")
    check(pool.run(differences, name, "sample=4", alone(name), STRATEGIES[name]))


def inferred(name: str, partition: str) -> tuple[float, float]:
    """The loss in inference mode, here and in one process."""
    network = NETWORKS[name].small()
    torch.manual_seed(0)
    model = network.build().eval()
    inputs, targets = network.sample(network.batch)
    with torch.inference_mode():
        expected = network.loss(model(inputs), targets).item()
    model = distconv.parallelize(model, distconv.init(partition, device_type="cpu"))
    with torch.inference_mode():
        return network.loss(model(inputs), targets).item(), expected


@pytest.mark.gloo
@pytest.mark.parametrize("partition", ["height=4", "sample=2,channel=2"])
@pytest.mark.parametrize("name", ["resnet18", "vgg16", "meshtangling1k", "unet3d", "cosmoflow"])
def test_inference_mode(ranks: Callable[[int], Ranks], name: str, partition: str) -> None:
    for found, expected in ranks(4).run(inferred, name, partition):
        assert found == pytest.approx(expected, rel=1e-12)
