from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp

over_mpi = pytest.mark.parametrize("ranks", ["mpi"], indirect=True)

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MOVED = [*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32, strided: bool = False) -> Tensor:
    """What `rank` holds: small integers, exact in every dtype."""
    flat = torch.arange(int(torch.Size(shape).numel())) % 5 + rank % 2
    made = flat.reshape(shape).to(torch.float32).to(dtype)
    return made.t().contiguous().t() if strided and len(shape) == 2 else made


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if actual.dtype == torch.float8_e4m3fn:
        actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def moves(dtype: torch.dtype, strided: bool) -> None:
    """Every collective that moves tensors, against what each rank is known to hold."""
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1

    def held(by: int, *shape: int) -> Tensor:
        return values(by, *shape, dtype=dtype, strided=strided)

    def room(*shape: int) -> Tensor:
        return torch.zeros_like(held(0, *shape))

    everyone = [held(other, 4, 3) for other in range(size)]
    own = held(rank, 4, 3)

    tensor = own.clone()
    dist.broadcast(tensor, root)
    same(tensor, everyone[root])

    parts = [room(4, 3) for _ in range(size)]
    dist.all_gather(parts, own)
    for part, expected in zip(parts, everyone, strict=True):
        same(part, expected)

    if dtype != torch.float8_e4m3fn:
        flat = torch.zeros(4 * size, 3, dtype=dtype)
        dist.all_gather_into_tensor(flat, own)
        same(flat, torch.cat(everyone))

    parts = [room(4, 3) for _ in range(size)] if rank == root else []
    dist.gather(own, parts or None, dst=root)
    for part, expected in zip(parts, everyone, strict=False):
        same(part, expected)

    tensor = room(4, 3)
    dist.scatter(tensor, everyone if rank == root else None, src=root)
    same(tensor, own)

    # Rank i sends j + 1 rows to rank j, and none to rank 0 from odd ranks.
    def rows(sender: int, receiver: int) -> int:
        return 0 if sender % 2 and receiver == 0 else receiver + 1

    sends = [rows(rank, other) for other in range(size)]
    receives = [rows(other, rank) for other in range(size)]
    tensor = room(sum(receives), 3)
    source = held(rank, sum(sends), 3)
    dist.all_to_all_single(tensor, source, receives, sends)
    expected = []
    for other in range(size):
        start = sum(rows(other, before) for before in range(rank))
        total = sum(rows(other, receiver) for receiver in range(size))
        expected.append(held(other, total, 3)[start : start + rows(other, rank)].to(torch.complex64))
    same(tensor.to(torch.complex64), torch.cat(expected))

    parts = [room(other + 1, 3) for other in range(size)]
    dist.all_to_all(parts, [held(rank, rank + 1, 3) for _ in range(size)])
    for other, part in enumerate(parts):
        same(part, held(other, other + 1, 3))

    tensor = room(4, 3)
    request = dist.irecv(tensor, (rank - 1) % size, tag=7)
    dist.send(own, (rank + 1) % size, tag=7)
    request.wait()
    same(tensor, everyone[(rank - 1) % size])


@over_mpi
@pytest.mark.parametrize("strided", [False, True], ids=["contiguous", "strided"])
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_moves(ranks, dtype, strided):
    ranks(3).run(moves, dtype, strided)


def reduces(dtype: torch.dtype, name: str, strided: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    operation = getattr(ReduceOp, name)
    everyone = torch.stack([values(other, 2 * size, 3, dtype=dtype) for other in range(size)])
    wide = everyone if not dtype.is_floating_point else everyone.double()
    expected = {
        "SUM": lambda: wide.any(0) if dtype == torch.bool else wide.sum(0),
        "AVG": lambda: wide.sum(0) / size,
        "PRODUCT": lambda: wide.prod(0),
        "MAX": lambda: wide.amax(0),
        "MIN": lambda: wide.amin(0),
        "BAND": lambda: wide[0] & wide[1] & wide[2],
        "BXOR": lambda: wide[0] ^ wide[1] ^ wide[2],
    }[name]().to(dtype)
    own = values(rank, 2 * size, 3, dtype=dtype, strided=strided)

    tensor = own.clone()
    dist.all_reduce(tensor, operation)
    same(tensor, expected)

    tensor = own.clone()
    dist.reduce(tensor, 1, operation)
    if rank == 1:
        same(tensor, expected)

    tensor = torch.zeros(2, 3, dtype=dtype)
    dist.reduce_scatter_tensor(tensor, own, operation)
    same(tensor, expected[2 * rank : 2 * rank + 2])

    uneven = [1, 3, 2]
    tensor = torch.zeros(uneven[rank], 3, dtype=dtype)
    dist.reduce_scatter(tensor, list(own.split(uneven)), operation)
    same(tensor, expected.split(uneven)[rank])


@over_mpi
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *[(dtype, name) for dtype in FLOATS for name in ("SUM", "AVG", "PRODUCT", "MAX", "MIN")],
        *[(torch.int64, name) for name in ("SUM", "PRODUCT", "MAX", "MIN", "BAND", "BXOR")],
        (torch.int32, "SUM"),
        (torch.uint8, "BAND"),
        (torch.bool, "SUM"),
        (torch.bool, "BAND"),
        (torch.complex64, "SUM"),
    ],
    ids=str,
)
def test_reduces(ranks, dtype, name):
    ranks(3).run(reduces, dtype, name, strided=dtype == torch.float32)


def half_sum_is_rounded_once() -> Tensor:
    # In bfloat16, 256 + 1 = 256: adding the ones one by one would lose them.
    tensor = torch.tensor([256.0 if dist.get_rank() == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(tensor)
    return tensor


@over_mpi
def test_half_precision_is_summed_in_float32(ranks):
    for tensor in ranks(3).run(half_sum_is_rounded_once):
        assert tensor.item() == 258


def unsupported(dtype: torch.dtype, name: str) -> None:
    dist.all_reduce(torch.ones(2).to(dtype), getattr(ReduceOp, name))


@over_mpi
@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "BOR"), (torch.float8_e4m3fn, "SUM")], ids=str)
def test_unsupported_reductions_are_refused(ranks, dtype, name):
    with pytest.raises(NotImplementedError, match=f"{name} of {dtype}"):
        ranks(2).run(unsupported, dtype, name)


def mismatched_splits() -> None:
    dist.all_to_all_single(torch.zeros(4), torch.zeros(4), [1, 2], [1, 3])


@over_mpi
def test_split_sizes_that_do_not_fit_are_refused(ranks):
    with pytest.raises(ValueError, match=r"split sizes \[1, 2\] for 4 rows"):
        ranks(2).run(mismatched_splits)


def many_in_flight() -> None:
    """Collectives of several kinds, sizes and groups, waited for in another order than issued."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([2, 3]), dist.new_group([3, 0])]
    pending = []
    for round_ in range(20):
        length = [1, 100, 100_000][round_ % 3]
        total = torch.full((length,), float(rank))
        pending.append((dist.all_reduce(total, async_op=True), total, sum(range(size))))
        for group in groups:
            members = dist.get_process_group_ranks(group)
            if rank in members:
                partial = torch.full((length,), float(rank))
                pending.append((dist.all_reduce(partial, group=group, async_op=True), partial, sum(members)))
        received = torch.empty(size)
        sent = torch.full((size,), float(rank))
        pending.append((dist.all_to_all_single(received, sent, async_op=True), received, None))
    for work, tensor, expected in reversed(pending) if rank % 2 else pending:
        work.wait()
        assert work.is_completed()
        same(tensor, torch.arange(float(size)) if expected is None else torch.full_like(tensor, expected))


def test_many_collectives_in_flight(ranks):
    ranks(4).run(many_in_flight)


def overlaps() -> tuple[bool, bool]:
    """A large sum completes while this thread does something else."""
    rank = dist.get_rank()
    tensor = torch.full((1 << 20,), float(rank))
    work = dist.all_reduce(tensor, async_op=True)
    future = work.get_future()
    deadline = time.monotonic() + 100
    while not future.done() and time.monotonic() < deadline:
        time.sleep(0.01)
    return future.done(), bool((future.value()[0] == 1).all())


@over_mpi
def test_completes_without_being_waited_for(ranks):
    assert ranks(2).run(overlaps) == [(True, True)] * 2


def receives_from_anyone() -> list[int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank:
        dist.send(torch.tensor([rank]), 0)
        return []
    sources = []
    for _ in range(size - 1):
        tensor = torch.zeros(1, dtype=torch.int64)
        source = dist.recv(tensor)
        assert source == tensor.item()
        sources.append(source)
    return sorted(sources)


@over_mpi
def test_receive_from_any_source(ranks):
    assert ranks(3).run(receives_from_anyone)[0] == [1, 2]


def objects() -> list[object]:
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    shared = [("from", rank)]
    dist.broadcast_object_list(shared, src=1)
    dist.barrier()
    exchange = [
        dist.P2POp(dist.isend, torch.tensor([rank]), (rank + 1) % size),
        dist.P2POp(dist.irecv, received := torch.zeros(1, dtype=torch.int64), (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(exchange):
        work.wait()
    return [gathered, shared, received.item()]


@over_mpi
def test_objects_and_batched_messages(ranks):
    for rank, (gathered, shared, received) in enumerate(ranks(3).run(objects)):
        assert gathered == [{"rank": other, "text": "x" * other} for other in range(3)]
        assert shared == [("from", 1)] and received == (rank - 1) % 3
