"""What programs do over MPI: functional collectives, DDP, DTensor, and how a job over MPI ends."""

from __future__ import annotations

import sys
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from ranks import Ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from tests.distconv.model.test_fully_sharded import trained
from tests.distconv.mpi.test_mpi import same, values

over_mpi = pytest.mark.parametrize("ranks", ["mpi"], indirect=True)


def with_functional_collectives() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = dist.group.WORLD
    own = values(rank, 2 * size, 3)
    everyone = [values(other, 2 * size, 3) for other in range(size)]
    total = torch.stack(everyone).sum(0)
    same(functional.all_reduce(own, "sum", group) * 1, total)
    same(functional.all_gather_tensor(own, 0, group) * 1, torch.cat(everyone))
    same(functional.reduce_scatter_tensor(own, "sum", 0, group) * 1, total[2 * rank : 2 * rank + 2])
    same(functional.broadcast(own, 1, group) * 1, everyone[1])
    for reduced in functional.all_reduce_coalesced([own, own], "sum", group):
        same(reduced * 1, total)
    mine = slice(2 * rank, 2 * rank + 2)
    same(functional.all_to_all_single(own, None, None, group) * 1, torch.cat([other[mine] for other in everyone]))
    functional.all_reduce(own, "sum", group)  # never waited for


def test_functional_collectives(ranks):
    ranks(2).run(with_functional_collectives)


def trains_with_ddp() -> list[float]:
    """Small buckets, so that several are in flight; compares with one process on the whole batch."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    plain = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.BatchNorm1d(64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
    )
    plain = plain.double()
    plain[1] = torch.nn.Identity()
    wrapped = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*plain.to(torch.float64).children()), bucket_cap_mb=0.001
    )
    optimizer = torch.optim.SGD(wrapped.parameters(), 0.1, momentum=0.9)
    x = torch.randn(8 * size, 8, dtype=torch.float64)
    y = torch.randn(8 * size, 4, dtype=torch.float64)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        mine = slice(8 * rank, 8 * rank + 8)
        loss = torch.nn.functional.mse_loss(wrapped(x[mine]), y[mine])
        loss.backward()
        optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def train_alone(size: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Identity(), torch.nn.ReLU(), torch.nn.Linear(64, 4))
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    x = torch.randn(8 * size, 8, dtype=torch.float64)
    y = torch.randn(8 * size, 4, dtype=torch.float64)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_ddp_trains_as_one_process(ranks):
    for losses in ranks(2).run(trains_with_ddp):
        assert losses == pytest.approx(train_alone(2), rel=1e-12)


def with_dtensor() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    torch.manual_seed(1)
    whole = torch.randn(5, 7, dtype=torch.float64)
    other = torch.randn(7, 6, dtype=torch.float64)
    left = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
    right = distribute_tensor(other, mesh, [Replicate(), Shard(0)])
    product = left @ right
    torch.testing.assert_close(product.full_tensor(), whole @ other)
    moved = left.redistribute(mesh, [Shard(1), Shard(0)])
    torch.testing.assert_close(moved.full_tensor(), whole)
    partial = DTensor.from_local(whole, mesh, [Partial(), Replicate()])
    torch.testing.assert_close(partial.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor(), 2 * whole)
    torch.testing.assert_close(left.sum().full_tensor(), whole.sum())


def test_dtensor(ranks):
    ranks(4).run(with_dtensor)


@over_mpi
def test_sharded_parameters(ranks):
    for found in ranks(4).run(trained, "sample=2,height=2", ("", "one sample")):
        assert len(found) == 2 and max(found.values()) < 1e-11, found


def times_out() -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 0:
        with pytest.raises(dist.DistBackendError, match="did not complete within"):
            dist.all_reduce(torch.ones(1), group=group)
        dist.send(torch.ones(1), 1)
    else:
        dist.recv(torch.ones(1), 0)
        dist.all_reduce(torch.ones(1), group=group)


@over_mpi
def test_a_rank_that_never_comes_is_an_error(ranks):
    ranks(2).run(times_out)


def raises_outside() -> None:
    if dist.get_rank() == 1:
        sys.excepthook(ValueError, ValueError("lost"), None)
        time.sleep(600)  # the end of the others, and of this rank, comes from outside
    dist.barrier()


def test_an_uncaught_exception_ends_every_rank():
    pool = Ranks(2, "mpi")
    with pytest.raises(RuntimeError, match="died"):  # and not that they give no answer
        pool.run(raises_outside)
    pool.close()
