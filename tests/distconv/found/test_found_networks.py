"""Networks that the campaign once found wrong, and some that it draws, against one process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import Ranks

from benchmarks.campaign.judge import together
from benchmarks.campaign.networks import Case, draw
from benchmarks.campaign.trial import Rank

FOUND = sorted(Path(__file__).parent.glob("*.json"))

pytestmark = pytest.mark.gloo


def compared(cases: list[Case]) -> list[dict[str, Any]]:
    """This rank's answers, of cases that one process can compute."""
    rank, answers = Rank(), []
    for case in cases:
        if dist.get_rank() == 0:
            rank.alone(case)
        answers.append(rank.compare(case))
    return answers


def outcomes(pool: Ranks, cases: list[Case]) -> list[dict[str, Any]]:
    answers = zip(*pool.run(compared, cases), strict=True)
    return [together(list(each[: case["ranks"]])) for case, each in zip(cases, answers, strict=True)]


@pytest.mark.parametrize("path", FOUND, ids=[path.stem for path in FOUND])
def test_what_was_found_is_right_now(ranks: Callable[[int], Ranks], path: Path) -> None:
    (answer,) = outcomes(ranks(4), [json.loads(path.read_text())])
    assert answer["outcome"] in ("right", "rounding"), answer


def test_some_networks_of_the_campaign(ranks: Callable[[int], Ranks]) -> None:
    alone, cases = Rank(), [draw(seed) for seed in range(100, 112)]
    cases = [case for case in cases if not case["compiled"] and not alone.alone(case)]
    assert len(cases) >= 8
    for case, answer in zip(cases, outcomes(ranks(4), cases), strict=True):
        assert answer["outcome"] in ("right", "rounding", "refused"), (case["seed"], answer)
