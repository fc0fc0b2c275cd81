"""Which way to compute a call within a limit is taken, what is followed for that, and the line about it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

from distconv.fitting import called, choice, models
from distconv.fitting.choice import Fit, fit_line, largest_within, ways_to_fit, with_others
from distconv.fitting.ladders import partition_ladders
from distconv.fitting.timeline import Segment, SegmentRecord, Storage, Timeline
from distconv.fitting.ways import AGAIN, AWAY, SegmentWay, recompute_instead_of_moving
from distconv.model.direct.chains.call import PRICES
from distconv.settings.partition import Partition
from distconv.turns.work import Followed, Work
from mucudnn.optimizer.retention import Retained


def timeline_of(seconds: float, peak: int) -> Timeline:
    timeline = Timeline([seconds], [0], [0], {0: Storage(peak, 0)}, largest=peak)
    timeline.forward = 1
    return timeline


@pytest.mark.parametrize(
    ("seconds", "limit", "chosen", "fits"),
    [(1.0, 100, None, True), (1.0, 50, "height=8", True), (1.0, 20, "height=32", True), (1.0, 10, "height=32", False)],
)
def test_the_fewest_parts_that_fit_are_taken(seconds: float, limit: int, chosen: str | None, fits: bool) -> None:
    asked = []

    def follow(partition: Partition, limit: float, own: int, _: Any) -> tuple[int, Followed]:
        asked.append(partition.ranks)
        taken = {2: 90, 4: 60, 8: 40, 16: 25, 32: 15}[partition.ranks]
        return largest_within(lambda memory: Followed(taken - 5, 0, with_scratch=taken), own, limit)

    found = ways_to_fit(timeline_of(seconds, 100), limit, {"height": 64}, follow, PRICES["cpu"], "cpu", 0)[0]
    assert (found.partition and str(found.partition), found.fits) == (chosen, fits)
    # Parts of which not even one operator fits are not followed.
    assert asked == {100: [], 50: [4, 8], 20: [8, 16, 32], 10: [16, 32]}[limit]


def test_parts_end_where_more_of_them_cannot_fit() -> None:
    asked = []

    def follow(partition: Partition, limit: float, own: int, _: Any) -> tuple[int, Followed]:
        asked.append(partition.ranks)
        taken = 40 + 24 // partition.ranks  # of which each part computes 40 whole
        return largest_within(lambda memory: Followed(5, 0, with_scratch=taken), own, limit)

    (found, *_) = ways_to_fit(timeline_of(1.0, 100), 35, {"height": 64}, follow, PRICES["cpu"], "cpu", 0)
    assert (asked, found.peak, found.fits) == ([4, 8], 46, False)
    asked.clear()
    assert ways_to_fit(timeline_of(1.0, 100), 42, {"height": 64}, follow, PRICES["cpu"], "cpu", 0)[0].fits
    assert asked == [4, 8, 16]


def test_samples_are_cut_first_then_the_longest_dim_of_space_and_then_both() -> None:
    found = [
        [str(partition) for partition in ladder] for ladder in partition_ladders({"sample": 3, "height": 5, "width": 4})
    ]
    space = ["height=2", "height=4", "height=5"]
    assert found == [["sample=2", "sample=3"], space, [f"sample=3,{each}" for each in space]]


def test_parts_whose_kernels_take_more_than_was_foreseen_are_given_less() -> None:
    def follow(partition: Partition, limit: float, own: int, _: Any) -> tuple[int, Followed]:
        return largest_within(lambda memory: Followed(memory, 0, spilled=8, with_scratch=memory + 8), own, limit)

    (found, *_) = ways_to_fit(timeline_of(1.0, 100), 50, {"height": 64}, follow, PRICES["cpu"], "cpu", 0)
    assert (str(found.partition), found.peak, found.memory, found.fits) == ("height=4", 48, 40, True)


def test_parts_of_which_much_moves_are_given_what_is_left() -> None:
    def follow(partition: Partition, limit: float, own: int, _: Any) -> tuple[int, Followed]:
        return largest_within(lambda memory: Followed(memory, 0, spilled=8, with_scratch=memory - 20), own, limit)

    (found, *_) = ways_to_fit(timeline_of(1.0, 100), 50, {"height": 64}, follow, PRICES["cpu"], "cpu", 0)
    assert found.fits and found.peak == 48 and found.memory == 68


def test_where_nothing_can_fit_the_most_parts_are_followed() -> None:
    def follow(partition: Partition, limit: float, own: int, _: Any) -> tuple[int, Followed]:
        return largest_within(lambda memory: Followed(3, 0, with_scratch=3), own, limit)

    (found, *_) = ways_to_fit(timeline_of(1.0, 100), 2, {"height": 64}, follow, PRICES["cpu"], "cpu", 0)
    assert (str(found.partition), found.peak, found.fits) == ("height=32", 3, False)


@pytest.mark.parametrize(
    ("of_parts", "beside", "chosen"),
    [
        (95, 0, "whole"),
        (80, 0, "in parts height=32 in turn"),
        (80, 200, "whole"),
        (40, 200, "in parts height=32 in turn"),
    ],
)
def test_where_nothing_fits_time_counts_among_what_takes_nearly_the_least(
    of_parts: int, beside: int, chosen: str
) -> None:
    def follow(partition: Partition, limit: float, own: int, _: Any) -> tuple[int, Followed]:
        slow = Work(operators=100_000)
        return largest_within(lambda memory: Followed(3, 0, with_scratch=of_parts, work=slow), own, limit)

    given = {"height": 64}, follow, PRICES["cpu"], "cpu", 0
    (found, *_) = ways_to_fit(timeline_of(1.0, 100), 2, *given, beside=beside)
    assert str(found) == chosen and not found.fits


def test_a_line_says_that_more_parts_were_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = timeline_of(1.0, 100)
    monkeypatch.setattr(choice, "MOST_FOLLOWED", 1)

    def follow(partition: Partition, limit: float, own: int, _: Any) -> tuple[int, Followed]:
        return largest_within(lambda memory: Followed(20, 0, with_scratch=75), own, limit)

    (found, *_) = ways_to_fit(timeline, 10, {"height": 64}, follow, PRICES["cpu"], "cpu", 0)
    assert found.partition is not None and found.partition.ranks == 16
    assert fit_line(found, timeline, 10).endswith(", and more parts were not followed, as that takes long")


def test_one_segment_is_named_as_one() -> None:
    ways = [SegmentWay(Segment("a", 0), kind, ()) for kind in (AGAIN, AWAY)]
    one, two = Fit(0, 1.0, tuple(ways)), Fit(0, 1.0, (*ways, *ways))
    assert str(one) == "whole, 1 segment recomputed in backward and the saved tensors of 1 segment offloaded"
    assert str(two) == "whole, 2 segments recomputed in backward and the saved tensors of 2 segments offloaded"


def test_the_least_of_segments_is_not_asked_for_where_parts_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Storage(80, 0, released=0, saved=0, first_used=2, freed=2)
    timeline = Timeline([1.0] * 4, [0] * 4, [0, 1, 1, 0], {0: kept, 1: Storage(20, 1)}, forward=2, largest=20)
    timeline.segments = [SegmentRecord(Segment("a", 0), 0, 1, (0, 1), frozenset(), frozenset({1}), True)]
    asked: list[Any] = []
    least = choice.least_limit
    monkeypatch.setattr(choice, "least_limit", lambda *of: asked.append(of) or least(*of))

    def found(peak: int) -> Fit:
        taken = Followed(peak, 0, with_scratch=peak)
        return ways_to_fit(
            timeline, 15, {"height": 64}, lambda _, limit, own, ways: (own, taken), PRICES["cpu"], "cpu", 0
        )[0]

    assert found(10).fits and not asked
    assert not found(90).fits and asked


def test_segments_are_computed_again_instead_of_what_takes_longer_to_move() -> None:
    def option(first: int, end: int, seconds: float, freed: int, kind: str = AGAIN) -> Retained:
        return Retained(first, end, seconds, freed, 1000, SegmentWay(Segment(f"{first}-{end}", 0), kind, ()))

    cheap, dear, both = option(0, 1, 1.0, 100), option(1, 2, 300.0, 100), option(0, 2, 201.0, 220)
    options = [
        cheap,
        dear,
        both,
        option(0, 1, 0.1, 100, AWAY),
        *(Retained(unit, unit + 1, 0.0, 0, 1000) for unit in range(2)),
    ]

    def chosen(moved: int, price: float = 1.0, room: int = 1000) -> list[Retained]:
        return recompute_instead_of_moving(options, 2, moved, price, room)

    assert chosen(1000) == [both]  # 440 s less of moves, in 201 s; without the second unit 200 in 1
    assert chosen(1000, price=0.7) == [cheap]
    assert chosen(200) == [cheap]  # no more than that is moved
    assert chosen(1000, room=430) == [cheap]  # what is computed again takes at most half of it
    assert chosen(1000, price=0.001) == []


def test_nothing_is_collected_while_calls_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    collects = []
    for name in ("followed", "parts_within"):
        follow = getattr(called, name)

        def watched(*args: Any, follow: Any = follow, **kwargs: Any) -> Any:
            collects.append(gc.isenabled())
            return follow(*args, **kwargs)

        monkeypatch.setattr(called, name, watched)
    model, x = nn.Sequential(nn.Conv2d(2, 16, 3), nn.ReLU(), nn.Conv2d(16, 1, 3)), torch.randn(1, 2, 128, 64)
    with torch.no_grad():
        models.Fitting("700KiB")(model, (x,), {}, [x], "cpu")
    assert len(collects) > 1 and not any(collects) and gc.isenabled()


@pytest.mark.parametrize(("later", "summed", "most"), [(0, 0, 8), (0, 9, 15), (5, 0, 14), (5, 9, 15), (5, 1, 14)])
def test_parts_take_what_later_calls_and_sums_over_ranks_need(later: int, summed: int, most: int) -> None:
    taken = Followed(8, 4, results=2, kept=3, with_scratch=8)
    assert with_others(lambda _: taken, later, summed, 1).with_scratch == most
