"""In an all-to-all of rows each member goes on as soon as it has its own."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distconv.turns.collectives import CollectiveArguments, all_reduce
from distconv.turns.rounds import CommonRound, FarMembers, RowsRound

MEMBERS = 4


def brought(at: int) -> CollectiveArguments:
    """A row for each neighbour, which holds who sends it and who gets it."""
    counts = [int(abs(at - other) == 1) for other in range(MEMBERS)]
    rows = [[at, other] for other in range(MEMBERS) if counts[other]]
    return CollectiveArguments([torch.tensor(rows)], [torch.full((sum(counts), 2), -1)], (counts, counts))


def expected(at: int) -> Tensor:
    return torch.tensor([[other, at] for other in range(MEMBERS) if abs(at - other) == 1])


def test_a_member_goes_on_when_its_neighbours_have_come() -> None:
    all_given = [brought(at) for at in range(MEMBERS)]
    one = RowsRound(MEMBERS)
    assert one.join(0, all_given[0]) == 0
    assert not one.may_go_on(0)
    assert one.join(1, all_given[1]) == 2 * all_given[0].outputs[0].nbytes
    assert one.may_go_on(0)
    assert not one.may_go_on(1)
    assert all_given[0].outputs[0].equal(expected(0))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_what_was_brought_may_be_changed_by_who_has_gone_on(order: tuple[int, ...]) -> None:
    all_given = [brought(at) for at in range(MEMBERS)]
    one, gone = RowsRound(MEMBERS), set()
    for at in order:
        one.join(at, all_given[at])
        for other in order[: order.index(at) + 1]:
            if other not in gone and one.may_go_on(other):
                one.leave(other)
                all_given[other].inputs[0].fill_(-2)
                gone.add(other)
    assert gone == set(range(MEMBERS))
    assert one.is_complete()
    for at, given in enumerate(all_given):
        assert given.outputs[0].equal(expected(at))


def test_rows_of_members_elsewhere_come_and_go_by_mail() -> None:
    sent: list[tuple[int, int, int, list[list[int]]]] = []
    elsewhere = FarMembers({0: 0, 3: 2}, lambda rank, at, to, tensors: sent.append((rank, at, to, tensors[0].tolist())))
    all_given = [brought(at) for at in range(MEMBERS)]
    one = RowsRound(MEMBERS, elsewhere)
    one.receive(0, 1, [torch.tensor([[0, 1]])])
    one.join(1, all_given[1])
    one.join(2, all_given[2])
    assert sent == [(0, 1, 0, [[1, 0]]), (2, 2, 3, [[2, 3]])]
    assert one.may_go_on(1) and not one.may_go_on(2) and not one.is_complete()
    one.receive(3, 2, [torch.tensor([[3, 2]])])
    assert one.is_complete()
    for at in (1, 2):
        one.leave(at)
        assert all_given[at].outputs[0].equal(expected(at))


@pytest.mark.parametrize("early", [True, False])
def test_members_elsewhere_that_disagree_on_rows_are_reported(early: bool) -> None:
    one = RowsRound(2, FarMembers({1: 1}, lambda rank, at, to, tensors: None))
    acts = [
        lambda: one.receive(1, 0, [torch.zeros(2, 1)]),
        lambda: one.join(0, CollectiveArguments([torch.zeros(0, 1)], [torch.zeros(1, 1)], ([0, 0], [0, 1]))),
    ]
    first, second = acts if early else acts[::-1]
    first()
    with pytest.raises(ValueError, match="member 0 expects 1 rows, and gets 2"):
        second()


def test_a_sum_with_members_elsewhere_is_done_when_all_have_sent() -> None:
    sent: list[tuple[int, int, int]] = []
    one = CommonRound(
        all_reduce, 4, FarMembers({2: 1, 3: 1}, lambda rank, at, to, tensors: sent.append((rank, at, to)))
    )
    own = [torch.full((2,), float(at + 1)) for at in range(2)]
    for at, x in enumerate(own):
        one.join(at, CollectiveArguments([x], (), dist.ReduceOp.SUM))
    assert sent == [(1, 0, -1), (1, 1, -1)]
    one.receive(2, -1, [torch.full((2,), 10.0)])
    assert not one.may_go_on(0)
    one.receive(3, -1, [torch.full((2,), 20.0)])
    assert one.may_go_on(0)
    one.leave(1)
    assert all(x.tolist() == [33.0, 33.0] for x in own)


def test_members_that_disagree_on_rows_are_reported() -> None:
    one = RowsRound(2)
    one.join(0, CollectiveArguments([torch.zeros(2, 1)], [torch.zeros(0, 1)], ([0, 2], [0, 0])))
    with pytest.raises(ValueError, match="member 1 expects 1 rows, and gets 2"):
        one.join(1, CollectiveArguments([torch.zeros(0, 1)], [torch.zeros(1, 1)], ([0, 0], [1, 0])))
