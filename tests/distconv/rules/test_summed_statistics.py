"""Statistics of many ranks, which are summed rather than gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collectives import Collectives
from ranks import Ranks
from reference import wrong

import distconv
from distconv.rules.normalization import shares
from distconv.rules.normalization.shares import StatisticsShare
from tests.distconv.rules.test_normalization import CASES, shifted


def wrong_by_sums(tables: Any, tolerance: float) -> Any:
    with mock.patch.object(StatisticsShare, "is_summed", lambda *_: True):
        return wrong(tables, tolerance)


@pytest.mark.gloo
def test_norms_by_sums_equal_one_process(ranks: Callable[[int], Ranks]) -> None:
    names = "batch, uneven", "batch, not affine", "group", "one group", "layer over space"
    cases = shifted({name: CASES[name] for name in names})
    for rank, found in enumerate(ranks(3).run(wrong_by_sums, [("width=3", cases), ("channel=3", cases)], 1e-10)):
        assert not found, f"rank {rank}"


def statistics_far_from_zero() -> tuple[float, float, list[str]]:
    """Relative errors of mean and variance of float32 elements whose mean is 3,000 times their deviation."""
    mesh = distconv.init(f"height={dist.get_world_size()}", device_type="cpu")
    torch.manual_seed(3)
    x = torch.randn(4, 2, 29, 31) + 3000
    norm = torch.nn.BatchNorm2d(2, momentum=1.0)
    model = distconv.parallelize(norm, mesh)
    with mock.patch.object(shares, "FEW", 1), Collectives() as sent:
        model(distconv.shard(x, mesh))
    variance, mean = torch.var_mean(x.double(), (0, 2, 3))
    errors = (model.running_mean - mean) / mean, (model.running_var - variance) / variance
    return *(float(error.abs().max()) for error in errors), [name for name in sent.called if "to_all" not in name]


@pytest.mark.gloo
def test_sums_keep_the_digits_of_float32(ranks: Callable[[int], Ranks]) -> None:
    for mean, variance, sent in ranks(3).run(statistics_far_from_zero):
        assert mean < 1e-7 and variance < 1e-5, (mean, variance)  # ranks' means are rounded to 1e-4
        assert len(sent) == 1 and "reduce" in sent[0]


def test_more_than_eight_ranks_sum() -> None:
    few, many = (StatisticsShare(None, 0, ((1,),) * ranks, ranks) for ranks in (8, 9))
    assert not few.is_summed(torch.float32)
    assert many.is_summed(torch.float32) and not many.is_summed(torch.float64)


def stopped_statistics() -> list[torch.Tensor]:
    """The state of a model two of whose calls a hook ends, and that of a later call."""
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 1)
    net, x = torch.nn.Sequential(*layers).double(), torch.randn(4, 3, 8, 6).double()

    def stop(*_: Any) -> None:
        raise ValueError("enough")

    for _ in range(2):
        with net[2].register_forward_hook(stop), pytest.raises(ValueError, match="enough"):
            net(x)
    found = [net[1].running_mean.clone(), *(value.clone() for value in net.state_dict().values())]  # type: ignore[operator, union-attr]
    net(x)
    return [*found, *net.state_dict().values()]


def stopped_on_ranks(partition: str) -> bool:
    mesh, expected = distconv.init(partition, device_type="cpu"), stopped_statistics()
    with distconv.distributed_script(mesh):
        given = [distconv.gather(x) for x in stopped_statistics()]
    return all(torch.allclose(*pair, rtol=1e-12, atol=1e-12) for pair in zip(given, expected, strict=True))


@pytest.mark.gloo
@pytest.mark.parametrize("partition", ["height=2", "channel=2"])
def test_a_call_that_an_exception_ends_moves_running_statistics(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert all(ranks(2).run(stopped_on_ranks, partition))
