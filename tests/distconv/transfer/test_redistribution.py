"""From any layout to any other: what arrives, the adjoint, and not a byte more than is needed and not owned."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

import distconv
from distconv.tensors.mesh import placements
from distconv.transfer import group_calls
from distconv.transfer.redistribution import Box, make_redistribution_plan, volume

PARTITIONS = {
    2: ("sample=2", "channel=2", "height=2", "sample=1,width=2"),
    3: ("sample=3", "channel=3", "width=3"),
    4: ("sample=4", "channel=4", "sample=2,channel=2", "channel=2,filter=2", "height=2,width=2", "height=2,sample=2"),
}
SHAPES = ((4, 6, 5, 3), (3, 2, 9, 1))


@st.composite
def grids(draw: st.DrawFn) -> tuple[list[Box], list[Box]]:
    """Two layouts of a tensor over the same members, each a grid of boxes that some members may hold alike."""
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    members = draw(st.integers(1, 6))

    def layout() -> list[Box]:
        parts: list[Box] = [()]
        for extent in shape:
            cuts = sorted({0, extent, *draw(st.lists(st.integers(0, extent), max_size=2))})
            intervals = list(pairwise(cuts)) or [(0, 0)]
            parts = [(*part, interval) for part in parts for interval in intervals]
        return [draw(st.sampled_from(parts)) for _ in range(members)]

    before, after = layout(), layout()
    held = set().union(*(cells(box) for box in before))
    return before, [box if cells(box) <= held else before[index] for index, box in enumerate(after)]


def cells(box: Box) -> set[tuple[int, ...]]:
    ranges = [torch.arange(start, stop) for start, stop in box]
    return set(map(tuple, torch.cartesian_prod(*ranges).view(-1, len(box)).tolist()))


def shifted(box: Box, outer: Box) -> Box:
    return tuple((start + first, stop + first) for (start, stop), (first, _) in zip(box, outer, strict=True))


@settings(max_examples=500)
@given(grids())
def test_transfers_agree_and_bring_each_missing_element_once(case: tuple[list[Box], list[Box]]) -> None:
    before, after = case
    plans = [make_redistribution_plan(before, after, member) for member in range(len(before))]
    for member, plan in enumerate(plans):
        for peer, other in enumerate(plans):
            sent = [shifted(box, before[peer]) for to, box in other.sends if to == member]
            received = [shifted(box, after[member]) for source, box in plan.receives if source == peer]
            assert sorted(sent) == sorted(received)
        have = [cells(shifted(box, after[member])) for _, box in plan.receives]
        kept = cells(shifted(plan.kept[1], after[member])) if plan.kept else set()
        assert plan.kept is None or shifted(plan.kept[0], before[member]) == shifted(plan.kept[1], after[member])
        assert set().union(kept, *have) == cells(after[member])
        assert sum(map(len, have)) == len(cells(after[member]) - cells(before[member]))
        assert sum(volume(box) for _, box in plan.receives) == sum(map(len, have))
    assert {plan.silent for plan in plans} == {not any(plan.receives for plan in plans)}


def owned(whole: Tensor, x: DTensor) -> Tensor:
    """The numbers that this rank owns, by DTensor's own account of its layout."""
    replicated = DTensor.from_local(whole, x.device_mesh, [Replicate()] * x.device_mesh.ndim, run_check=False)
    return replicated.redistribute(placements=x.placements).to_local()


def between(partitions: tuple[str, ...]) -> list[Any]:
    """For every pair of partitions: whether the parts are right, the adjoint's gap, and elements received too many."""
    moved: list[int] = []
    transport = group_calls.all_to_all_single

    def counting(output: Tensor, *rest: Any, **options: Any) -> Any:
        moved.append(output.numel())
        return transport(output, *rest, **options)

    answers: list[Any] = []
    group_calls.all_to_all_single = counting
    try:
        for first in partitions:
            for second in partitions:
                for shape in SHAPES:
                    mesh = distconv.init(first, device_type="cpu")
                    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
                    x = distconv.shard(whole, mesh)
                    moved.clear()
                    y = distconv.redistribute(x, second)
                    right = torch.equal(y._local_tensor, owned(whole, y)) and y.shape == x.shape
                    right &= y.placements == placements(y.device_mesh, len(shape))
                    needed = set(y._local_tensor.flatten().tolist()) - set(x._local_tensor.flatten().tolist())
                    surplus = sum(moved) - len(needed)
                    values = torch.randn(shape, dtype=torch.float64).requires_grad_()
                    cotangent = torch.randn(shape, dtype=torch.float64)
                    forth = distconv.redistribute(distconv.shard(values, mesh), second)
                    back = distconv.shard(cotangent, y.device_mesh)
                    (grad,) = torch.autograd.grad(forth, values, back)
                    gap = float((forth * back).sum().item() - (values * grad).sum())
                    answers.append((right, gap, surplus, float((grad - cotangent).abs().max())))
    finally:
        group_calls.all_to_all_single = transport
    return answers


@pytest.mark.parametrize("size", [2, 3, 4])
def test_between_all_partitions(ranks: Callable[[int], Ranks], size: int) -> None:
    pool = ranks(size)
    partitions = PARTITIONS[size] if pool.backend == "gloo" else PARTITIONS[size][:3]
    for answers in pool.run(between, partitions):
        assert len(answers) == len(partitions) ** 2 * len(SHAPES)
        for right, gap, surplus, error in answers:
            assert right and surplus == 0 and abs(gap) < 1e-12 and error == 0


def special() -> list[Any]:
    mesh = distconv.init("sample=4", device_type="cpu")
    whole = torch.randn(4, 6, 5, 5)
    last = distconv.shard(whole.to(memory_format=torch.channels_last), mesh)
    wide, with_empty = (distconv.redistribute(last, partition) for partition in ("height=2,width=2", "height=4"))
    replicated = DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    same = distconv.redistribute(replicated, "channel=4")
    same.mul_(2)
    ends = distconv.shard(whole, mesh).sum(0)
    labels = distconv.redistribute(distconv.shard(torch.arange(7), mesh), "channel=4")
    sums = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    return [
        wide._local_tensor.is_contiguous(memory_format=torch.channels_last),
        with_empty._local_tensor.is_contiguous() and with_empty.is_contiguous(),  # as the rank without rows has it
        same.placements == (Replicate(),) and torch.equal(replicated._local_tensor, whole),
        torch.equal(distconv.gather(distconv.redistribute(ends, "height=4")), ends._local_tensor),
        labels.placements == (Replicate(),) and labels._local_tensor.tolist() == list(range(7)),
        torch.allclose(distconv.gather(distconv.redistribute(sums, "channel=2,sample=2")), 4 * whole),
    ]


def test_layouts_that_are_not_the_usual(ranks: Callable[[int], Ranks]) -> None:
    for answers in ranks(4).run(special):
        assert answers == [True] * 6


def refusals() -> list[str]:
    mesh = distconv.init("sample=2,channel=2", device_type="cpu")
    part = distconv.init("height=2", ranks=[1, 2], device_type="cpu")  # ranks for which no other test makes a mesh
    x = distconv.shard(torch.randn(2, 2, 2, 2), mesh)
    found = []
    for tensor, partition in ((x, "sample=3"), (x, "rows=4"), (x, part), (torch.randn(2), "sample=4")):
        try:
            distconv.redistribute(tensor, partition)
        except (ValueError, NotImplementedError) as error:
            found.append(str(error))
    if mesh.get_rank() in (1, 2):
        try:
            distconv.redistribute(distconv.shard(torch.randn(2, 2, 2, 2), part), "width=2")
        except ValueError as error:
            found.append(str(error))
    return found


def test_refusals_are_one_line(ranks: Callable[[int], Ranks]) -> None:
    answers = ranks(4).run(refusals)
    assert answers[1][:4] == answers[3] and len(answers[1]) == 5
    starts = (
        "partition 'sample=3' needs 3 ranks, but the mesh has 4",
        "partition 'rows=4': unknown axis 'rows'",
        "redistribute: from a mesh over ranks [0, 1, 2, 3] to one over ranks [1, 2]",
        "redistribute: a Tensor; accepted: a DTensor",
        "partition 'width=2' over ranks [1, 2]: accepted: the mesh that distconv.init gave",
    )
    for found, start in zip(answers[1], starts, strict=True):
        assert found.startswith(start) and "\n" not in found
