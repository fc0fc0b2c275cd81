"""No training step reads a tensor on the host: on a GPU none waits for the device, and a step can be captured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch
from ranks import Ranks
from torch import Tensor, nn

import distconv

pytestmark = pytest.mark.gloo

READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__")
"""The methods of a tensor that wait for its values."""


class Waits(Exception):
    """A step has read values on the host."""


@contextlib.contextmanager
def no_reading() -> Iterator[None]:
    """Within it, what would wait for a device raises."""

    def refused(name: str) -> Any:
        def read(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            raise Waits(f"{name} of a tensor {tuple(x.shape)}")

        return read

    with MonkeyPatch.context() as patched:
        for name in READS:
            patched.setattr(Tensor, name, refused(name))
        yield


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.GroupNorm(2, 4),
        nn.AvgPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 6),
    )


def step_without_reading(partition: str) -> None:
    with MonkeyPatch.context() as patched:
        patched.setenv("DISTCONV_CHECK", "off")  # its verdicts are read on a host, and travel by themselves on a GPU
        model = distconv.parallelize(layers(), distconv.init(partition, device_type="cpu"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, targets = torch.rand(4, 3, 12, 12), torch.arange(4)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), targets).backward()
            optimizer.step()

        step()  # the plans are made
        with no_reading():
            with pytest.raises(Waits):
                float(x.sum())
            step()


@pytest.mark.parametrize(
    "partition", ["sample=4", "height=4", "sample=2,height=2", "height=2,width=2", "sample=2,channel=2"]
)
def test_a_step_reads_nothing_on_the_host(ranks: Callable[[int], Ranks], partition: str) -> None:
    pool = ranks(4)
    if pool.backend == "mpi":
        pytest.skip("over Gloo")
    pool.run(step_without_reading, partition)


def loss_of_no_class(partition: str) -> str:
    mesh = distconv.init(partition, device_type="cpu")
    try:
        nn.functional.cross_entropy(distconv.shard(torch.rand(2, 4, 3, 3), mesh), torch.full((2, 3, 3), 4))
    except (IndexError, RuntimeError) as error:
        return str(error)
    return ""


def test_a_number_of_no_class_is_refused_on_every_rank(ranks: Callable[[int], Ranks]) -> None:
    assert all("out of bounds" in told for told in ranks(2).run(loss_of_no_class, "channel=2"))
