"""Workspaces within what a plan of all memory leaves for them."""

from __future__ import annotations

import pytest
import torch

import mucudnn
from mucudnn.convolution.call import Call
from mucudnn.convolution.problem import Direction
from mucudnn.providers.stock import columns_bytes

MIB = 1 << 20


class Plan:
    """May be garbage."""


@pytest.mark.parametrize("planning", ["ahead", "live"])
def test_workspaces_keep_within_what_is_left(planning: str) -> None:
    x, w, other = torch.ones(4, 8, 24, 24).double(), torch.ones(8, 8, 5, 5).double(), torch.ones(8, 8, 3, 3).double()
    call = Call(Direction.FORWARD, x, w, None, None, (1, 1), (2, 2), (1, 1), False, (0, 0), 1)
    problem = call.problem(torch.conv2d(x, w, padding=2))
    assert problem is not None
    columns = columns_bytes(problem)
    assert columns > 0
    with mucudnn.patched(workspace_limit="64MiB", planning=planning, database=":memory:", progress="off") as session:

        def limits() -> set[float]:
            for _ in range(50):  # Where the machine is busy, live planning leaves some calls to torch.
                for _ in range(40):
                    torch.conv2d(x, w, padding=2)
                    torch.conv2d(x, other)
                found = {each.limit - columns for each in session.records() if each.problem.w_shape == w.shape}
                if found:
                    break
            return found

        assert limits() == {64 * MIB - columns}
        plan, other_plan = Plan(), Plan()
        session.leave(plan, {call.kind: 3 * MIB}, 0)
        assert limits() == {3 * MIB}
        session.leave(other_plan, {call.kind: 5 * MIB}, 0)
        assert limits() == {3 * MIB}, "the least counts"
        session.leave(plan, {call.kind: 4 * MIB}, 0)
        del plan
        session.leave(other_plan, {call.kind: 2 * MIB}, 0)
        assert limits() == {2 * MIB}
        (rest,) = [record for record in session.records() if record.problem.w_shape == other.shape]
        assert rest.limit == columns_bytes(rest.problem)
        session.leave(other_plan, None, 0)
        assert limits() == {0}
        assert all(record.workspace <= max(record.limit, columns) for record in session.records())
