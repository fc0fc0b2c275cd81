"""The campaign of random networks in short; what it calls wrong; and how it makes a failure smaller."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.campaign import plans as campaign_plans
from benchmarks.campaign.campaign import kept, next_of
from benchmarks.campaign.in_turn import case_of, tried
from benchmarks.campaign.judge import PLAIN, Judge, lines, shrunk, together
from benchmarks.campaign.networks import draw, draw_with_state, network
from benchmarks.campaign.rounding import differences, fingerprints
from benchmarks.campaign.state import CHANGES, KEPT, MADE
from benchmarks.campaign.tables import counts, tables
from benchmarks.campaign.training import plainest, train
from benchmarks.campaign.trial import Rank
from benchmarks.campaign.within import SMALL, DrawnWays, fitted, let_small_leave
from benchmarks.rank_pool import Hang, RankPool

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("draw", [draw, draw_with_state])
def test_a_seed_gives_one_network(draw: Callable[[int], dict[str, Any]]) -> None:
    for seed in range(20):
        case = draw(seed)
        assert draw(seed) == case == json.loads(json.dumps(case))
        first, second = (network(case) for _ in range(2))
        assert first[1] == second[1]
        states = [each[0].state_dict() for each in (first, second)]
        assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def test_what_differs_is_found() -> None:
    right = {"loss 0": torch.tensor(2.0), "gradient of w 0": torch.tensor([4.0, 0.0])}
    assert max(differences(right, right).values()) == 0.0
    assert differences(right | {"loss 0": torch.tensor(3.0)}, right)["loss 0"] == 0.5
    assert differences(right | {"loss 0": torch.tensor(math.nan)}, right)["loss 0"] == math.inf
    assert differences(right | {"loss 0": torch.ones(1)}, right)["loss 0"] == math.inf
    assert max(differences({"loss 0": right["loss 0"]}, right).values()) == math.inf


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", [*CHANGES, *MADE, *KEPT])
def test_state_makes_a_difference_each_time_the_same(way: str) -> None:
    sizes = {"kernel": [3], "stride": [1], "padding": "same", "dilation": [1], "mode": "zeros"}
    layer = {"kind": "convolution", "filters": 3, "groups": 1, "bias": True, **sizes}
    plain: dict[str, Any] = {**PLAIN, "seed": 0, "shape": [2, 3, 5], "layers": [layer]}
    block = {"kind": "state", "way": way, "where": "forward", "twice": False, "layers": [layer]}
    first, second = (train(plain | {"layers": [block]}) for _ in range(2))
    assert max(differences(first, second).values()) == 0.0
    assert abs(first["loss 1.0"] - train(plain)["loss 1.0"]) > 1e-6


@pytest.mark.filterwarnings("ignore")
def test_networks_compute_in_ways_that_a_limit_of_memory_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, _ in SMALL:
        monkeypatch.setattr(module, name, getattr(module, name))  # which `let_small_leave` changes
    let_small_leave()
    rank, ways = Rank(), list[DrawnWays]()
    for seed in range(6430000, 6430008):
        case = case_of(seed)
        answer = tried(rank, case, lambda model, case=case: ways.append(fitted(case, model)))
        assert answer["outcome"] in ("right", "rounding", "unable"), (seed, answer)
    taken = [way for each in ways for way in each.taken]
    assert any("parts" in way for way in taken) and any("segment" in way for way in taken), taken


FOUND = ROOT / "tests/distconv/found"


@pytest.mark.parametrize("name", ["zeros-before-relu", "near-zero-in-bfloat16"])
def test_kinks_within_rounding_are_distinguished_from_what_is_wrong(name: str) -> None:
    case = json.loads((FOUND / f"{name}.json").read_text())
    rank = Rank()
    with torch.backends.mkldnn.flags(enabled=case["dtype"] == "float64"):
        rank.alone(case)
        wide = train(plainest(case), dtype=torch.float64)
        crossed = [train(plainest(case), dtype=torch.float64, change=number) for number in range(100, 108)]
        biased = {key: value * 1.2 if "gradient" in key else value for key, value in wide.items()}
        outcomes = [rank.judged(case, found)["outcome"] for found in (wide, *crossed, biased)]
    assert (
        outcomes[0] == "right"
        and "rounding" in outcomes
        and outcomes.count("wrong") == 1 == outcomes[-1:].count("wrong")
    )


def test_what_torch_cannot_compile_is_no_fault_of_ranks() -> None:
    plain: dict[str, Any] = {
        **{name: value for name, value in PLAIN.items() if name != "compiled"},
        **{"seed": 0, "shape": [1, 2, 4], "compiled": "aot_eager"},
    }
    rank = Rank()
    kept = plain | {"layers": [{"kind": "activation", "of": "silu"}]}
    changed = plain | {"layers": [{"kind": "activation", "of": "silu in place"}]}
    assert not rank.alone(kept) and not rank.compiled_alone(kept)
    assert not rank.alone(changed) and "modified by an inplace operation" in rank.compiled_alone(changed)


@pytest.mark.parametrize(
    ("alone", "outcome"), [("RuntimeError: size 12", "unable"), ("RuntimeError: another", "unable"), ("", "crash")]
)
def test_a_crash_is_torchs_if_one_process_cannot_compile_the_network(
    alone: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pool:
        def ask(self, name: str, *_: Any, **__: Any) -> list[Any]:
            assert name in ("compare", "compiled_alone")
            crash = {"outcome": "crash", "said": "RuntimeError: size 3"}
            return [alone] if name == "compiled_alone" else [crash]

        def close(self) -> None:
            pass

    monkeypatch.setattr("benchmarks.campaign.judge.RankPool", lambda *_: Pool())
    assert Judge()._on_ranks({"ranks": 1, "compiled": "aot_eager"})["outcome"] == outcome


def answer(outcome: str, value: float, **more: Any) -> dict[str, Any]:
    return {"outcome": outcome, "fingerprints": fingerprints({"w": torch.tensor([value])}), "divided": 1, **more}


def test_outcomes_of_ranks_are_joined() -> None:
    assert together([answer("right", 1.0), answer("idle", 1.0)]) == {"outcome": "right", "divided": 2}
    unlike = together([answer("right", 1.0), answer("idle", 2.0)])
    assert unlike["outcome"] == "wrong" and unlike["said"] == "the ranks hold different bits of w"
    refused = {"outcome": "refused", "said": "no"}
    assert together([refused, dict(refused)]) == refused
    assert together([refused, answer("idle", 1.0)])["outcome"] == "crash"
    assert together([refused, {"outcome": "refused", "said": "never"}])["outcome"] == "crash"
    assert together([{"outcome": "crash", "said": text} for text in "ab"])["outcome"] == "crash"


class Pools:
    """Finds every network wrong that has a pool and more than two samples, on two ranks or more."""

    def of_case(self, case: dict[str, Any]) -> dict[str, Any]:
        has = '"pool"' in json.dumps(case["layers"])
        is_wrong = has and case["shape"][0] > 2 and case["ranks"] > 1
        return {"outcome": "wrong" if is_wrong else "right", "said": "loss 0"}


def test_a_failure_is_made_smaller() -> None:
    judge: Any = Pools()
    case = next(case for seed in range(300) if judge.of_case(case := draw(seed))["outcome"] == "wrong")
    small, found = shrunk(case, judge.of_case(case), judge, 30)
    assert found["outcome"] == "wrong"
    assert len(small["layers"]) == 1 and small["layers"][0]["kind"] == "pool"
    assert small["ranks"] == 2 and small["shape"][0] == 3 and max(small["shape"][1:]) == 0
    assert json.loads(lines(small, found))["layers"] == small["layers"]


def test_runs_go_on_and_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "partial.jsonl"
    assert kept(path, 0) == {}
    more = {"partition": "sample=2,height=2", "limit": None, "compiled": "", "dtype": "float64"}
    outcomes = {0: "right", 1: "refused", 2: "unable", 1 << 20: "wrong"}
    refusal = {"operator": "aten::median", "why": "it needs the whole"}
    text = [json.dumps({"number": n, "outcome": o, **more, **refusal}) for n, o in outcomes.items()]
    path.write_text("\n".join(text))
    found = kept(path, 0)
    assert list(found) == [0, 1, 2] and list(kept(path, 1)) == [1 << 20]
    assert counts(list(found.values())) == dict(right=1, rounding=0, wrong=0, refused=1, crash=0, hang=0)
    found[0]["plans"] = {"partition": "height=3,width=2", "outcome": "right"}
    by_way, refused, plans = tables(list(found.values()))
    assert plans.rows == [("6 ranks, 2 axes", "1", "1", "0", "0", "0")]
    assert by_way.rows[0][:3] == ("split: samples and space", "2", "1")
    assert refused.rows == [("aten::median", "1", "it needs the whole")]


def test_each_number_is_taken_once() -> None:
    taken = multiprocessing.Value("q", 0)
    first, second = (next_of([4, 5, 7, 9], taken) for _ in range(2))
    assert [next(first), next(second), *first] == [4, 5, 7, 9] and list(second) == []


class Sleeper:
    def sleep(self) -> None:
        time.sleep(60)


def test_ranks_without_an_answer_hang() -> None:
    pool = RankPool(1, Sleeper, "fake")
    with pytest.raises(Hang, match="no answer from rank"):
        pool.ask("sleep", within=0.5)


def test_plans_that_differ_are_found() -> None:
    def all_to_all(sent: tuple[int, ...], received: tuple[int, ...]) -> campaign_plans.Message:
        return campaign_plans.Message("all-to-all", (0, 1), "float", sent, received)

    first, second = all_to_all((0, 3), (0, 2)), all_to_all((2, 0), (3, 0))
    other = all_to_all((2, 0), (4, 0))
    total = campaign_plans.Message("all-reduce", (0, 1), "float", (5,), (5,))
    assert campaign_plans.unlike([[first, total], [second, total]]) == ""
    assert "0 sends 3, 1 expects 4" in campaign_plans.unlike([[first], [other]])
    assert "messages among (0, 1)" in campaign_plans.unlike([[first, total], [second]])
    assert "message 0 among (0, 1)" in campaign_plans.unlike([[first, total], [total, second]])
    assert "of [(5,), (6,)]" in campaign_plans.unlike([[total], [total._replace(sent=(6,))]])


def test_some_networks_have_the_same_plans_on_many_ranks() -> None:
    cases = [draw(seed) for seed in (1, 2, 4, 9)]
    assert {campaign_plans.widened(case)["ranks"] for case in cases} == {6, 8}
    planner = campaign_plans.Planner()
    try:
        answers = [planner.of_case(case) for case in cases]
    finally:
        planner.close()
    assert {answer["outcome"] for answer in answers} <= {"right", "refused"}, answers
    assert any(answer["outcome"] == "right" for answer in answers)


def of_convolutions(found: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    with torch.backends.mkldnn.flags(enabled=False):
        return [found(number) for number in range(80)]


@pytest.mark.filterwarnings("ignore")
def test_random_convolutions_are_right_and_within_their_limits() -> None:
    from benchmarks.layers import convolutions

    records = of_convolutions(convolutions.judged)
    assert not [record for record in records if record["faults"]]
    assert sum(record["parts"] != "1 stock" for record in records) > 40


def test_convolutions_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.layers import convolutions

    asked: list[int] = []

    def judged(number: int) -> dict[str, Any]:
        asked.append(number)
        return {"number": number, "faults": []}

    monkeypatch.setattr(convolutions, "judged", judged)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    for most in ("2", "5"):
        arguments = ["convolutions.py", "--first", "7", "--convolutions", most, "--partial", str(tmp_path / "partial")]
        monkeypatch.setattr("sys.argv", arguments)
        with torch.backends.mkldnn.flags(enabled=False):
            assert convolutions.main() == 0
    assert asked == [7, 8, 9, 10, 11]


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_convolution_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.layers import convolutions

    computed = convolutions.computed
    monkeypatch.setattr(convolutions, "computed", lambda plan, given: computed(plan, given) + 0.1)
    assert sum("error" in record["faults"] for record in of_convolutions(convolutions.judged)) > 40
