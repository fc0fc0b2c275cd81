"""Which collective waits for which ranks: what is noted, and the line that is told."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from jobs import SCRIPTS, command, needs_mpi, started
from ranks import Ranks

from distconv.job.stall_watchdog import noted
from distconv.job.whereabouts import RankState, Waiting, standstill

ALL, FIRST, SECOND = (0, 1, 2, 3), (0, 1), (2, 3)


def waits(name: str, group: str, number: int, ranks: tuple[int, ...], line: str = "a.py:3") -> RankState:
    return RankState({group: number}, Waiting(name, group, number, ranks, 30.2), line)


def computes(group: str, number: int, line: str = "a.py:9") -> RankState:
    return RankState({group: number}, None, line)


def line(states: dict[int, RankState]) -> str:
    found = standstill(states)
    assert found is not None
    return found[1]


def test_ranks_that_have_not_begun_are_named_with_their_lines() -> None:
    states = {rank: waits("all_reduce", "world", 7, ALL) for rank in (0, 1)} | {2: computes("world", 6)}
    assert line(states) == (
        "all_reduce among ranks 0, 1, 2 and 3 at a.py:3 has waited 30 s for rank 2, at a.py:9; rank 3, not answering"
    )
    states[3] = computes("world", 5)
    assert line(states).endswith("for ranks 2 and 3, at a.py:9")


def test_where_nobody_waits_there_is_nothing_to_tell() -> None:
    assert standstill({}) is None
    assert standstill({rank: computes("world", 3) for rank in ALL}) is None


def test_of_several_that_wait_in_a_chain_the_last_is_named() -> None:
    states = {
        0: waits("all_to_all_single", "first", 4, FIRST, "a.py:2"),
        1: waits("all_reduce", "world", 9, ALL, "a.py:5"),
        2: waits("all_reduce", "world", 9, ALL, "a.py:5"),
        3: computes("world", 8),
    }
    assert line(states) == "all_reduce among ranks 0, 1, 2 and 3 at a.py:5 has waited 30 s for rank 3, at a.py:9"
    found = standstill(states)
    assert found is not None and (found[0].group, found[0].number) == ("world", 9)


def test_a_rank_that_has_just_begun_to_wait_goes_on_meanwhile() -> None:
    """As where some ranks work on a sample, and others, which have none, wait for them."""
    states = {rank: waits("all_reduce", "world", 9, ALL) for rank in FIRST}
    for rank in SECOND:
        states[rank] = RankState({"world": 8, "pair": 70}, Waiting("all_gather", "pair", 70, SECOND, 0.1), "a.py:7")
    assert line(states) == "all_reduce among ranks 0, 1, 2 and 3 at a.py:3 has waited 30 s for ranks 2 and 3, at a.py:7"


def test_a_rank_that_has_passed_on_is_not_waited_for() -> None:
    """The source of a broadcast goes on when it has sent."""
    states = {0: computes("world", 4), 1: waits("broadcast", "world", 4, ALL), 2: waits("broadcast", "world", 4, ALL)}
    assert "for rank 3, not answering" in line(states)


def test_ranks_that_wait_for_one_another() -> None:
    states = {
        0: RankState({"first": 1, "world": 2}, Waiting("all_gather", "first", 1, FIRST, 31.0), "a.py:2"),
        1: RankState({"world": 3}, Waiting("all_reduce", "world", 3, FIRST, 31.0), "a.py:8"),
    }
    assert line(states) == (
        "ranks wait for one another: rank 0 in all_gather among ranks 0 and 1 at a.py:2 for rank 1; rank 1 in "
        "all_reduce among ranks 0 and 1 at a.py:8 for rank 0"
    )


def test_ranks_of_one_group_in_unlike_collectives() -> None:
    states = {0: waits("all_gather", "world", 5, FIRST), 1: waits("barrier", "world", 5, FIRST, "a.py:8")}
    assert line(states) == (
        "ranks of one group are in different collectives: rank 0 in all_gather at a.py:3, rank 1 in barrier at a.py:8"
    )


def test_a_collective_that_takes_long_though_all_are_there() -> None:
    states = {rank: waits("all_reduce", "world", 5, FIRST) for rank in FIRST}
    assert line(states).endswith("at a.py:3 has waited 30 s, though all its ranks are there")


def late(looked: Path) -> tuple[list[str | None], dict[str, int], bool]:
    """What a rank waits in while another one is late, what all have begun, and whether all are complete at the end.

    ``looked``: is made once the first rank has looked, for which the other one waits.
    """
    names = []
    with noted() as collectives:
        dist.barrier()
        x = torch.ones(3)
        while dist.get_rank() == 1 and not looked.exists():
            time.sleep(0.01)
        work = dist.all_reduce(x, async_op=True)
        if dist.get_rank() == 0:
            time.sleep(0.2)  # in which it would be complete, were the other one there
        else:
            work.wait()
        begun = collectives.waiting()
        names.append(None if begun is None else begun.name)
        if dist.get_rank() == 0:
            looked.touch()
        work.wait()
        dist.all_gather_object([None] * dist.get_world_size(), dist.get_rank())
        counts, complete = collectives.counts, collectives.waiting() is None
    before = dict(counts)
    dist.barrier()
    assert counts == before
    return names, counts, complete


def test_what_a_rank_has_begun_and_waits_in_is_known(ranks: Callable[[int], Ranks], tmp_path: Path) -> None:
    found = ranks(2).run(late, tmp_path / "looked")
    assert [names for names, _, _ in found] == [["all_reduce"], [None]]
    assert found[0][1] == found[1][1] and sum(found[0][1].values()) >= 4  # the objects take two
    assert all(complete for _, _, complete in found)


@pytest.mark.parametrize("way", ["alone", pytest.param("mpiexec", marks=needs_mpi)])
def test_a_late_rank_is_reported_in_one_line_and_the_job_goes_on(way, tmp_path):
    temporary, go_on = tmp_path / "temporary", tmp_path / "go on"
    temporary.mkdir()
    script = [str(SCRIPTS / "slow.py"), str(go_on)]
    arguments = command(way, 2, "--show-ranks", "--slow-after", "4", "--partition", "height=2", *script)
    errors = ""
    with started(arguments, temporary) as job:
        while " has waited " not in errors:
            errors += (said := job.process.stderr.readline())
            assert said, errors
        go_on.touch()
        code, printed, rest = job.end()
    errors += rest
    assert code == 0 and "done" in printed, errors
    told = [line for line in errors.splitlines() if line.startswith("distconv: ")]
    assert len(told) == 1, errors
    assert "all_reduce among ranks 0 and 1 at " in told[0] and "slow.py:14 has waited " in told[0]
    assert re.search(r"slow\.py:1[23]$", told[0])
