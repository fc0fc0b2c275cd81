"""Where steps begin, which repeat, and the budgets of their calls."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mucudnn.budgets.steps import MOST_TRIES, Steps
from mucudnn.optimizer import StepTimeline


class Script:
    """A recorder of a made-up program: the timelines that it will find, and what was asked of it."""

    one_thread = True

    def __init__(self, *timelines: StepTimeline) -> None:
        self.timelines = list(timelines)
        self.starts, self.running, self.steps, self.marks = 0, False, 0, 0

    def start(self) -> bool:
        self.starts, self.running, self.steps = self.starts + 1, True, 0
        return True

    def step(self) -> None:
        assert self.running
        self.steps += 1

    def mark(self, size: int) -> None:
        assert self.running
        self.marks += bool(self.steps)

    def stop(self) -> list[StepTimeline]:
        self.running = False
        return self.timelines


def play(steps: Steps, names: str) -> list[int | None]:
    """Calls: capitals forward, small letters backward."""
    return [steps.call(name, name.isupper(), 0) for name in names]


def test_a_step_that_repeats_is_recorded_and_then_has_budgets() -> None:
    script = Script(StepTimeline((5, 7, 9, 6), 10), StepTimeline((6, 7, 8, 6), 11))
    steps = Steps(script, StepTimeline.budgets)
    for number in range(4):  # it is met, memory turns over, and two are recorded
        assert play(steps, "ABba") == [None] * 4
        assert script.running == (number > 0)
    assert script.marks == 8
    for _ in range(3):
        assert play(steps, "ABba") == [4, 3, 1, 4]
    assert script.starts == 1 and not script.running


def test_a_step_of_other_shapes_runs_without_and_is_recorded_in_its_turn() -> None:
    steps = Steps(Script(StepTimeline((5, 7, 9, 6), 10), StepTimeline((5, 7, 9, 6), 10)), StepTimeline.budgets)
    for _ in range(4):
        play(steps, "ABba")
    for _ in range(4):
        assert play(steps, "CDdc") == [None] * 4
    assert play(steps, "CDdc") == [5, 3, 1, 4]
    assert play(steps, "ABba") == [5, 3, 1, 4]
    assert play(steps, "ABca") == [5, 3, None, None]  # known so far, then no more


def test_of_steps_with_the_same_beginning_the_smaller_budget_counts() -> None:
    script = Script(StepTimeline((5, 7, 9, 6), 10), StepTimeline((5, 7, 9, 6), 10))
    steps = Steps(script, StepTimeline.budgets)
    for _ in range(5):
        play(steps, "ABba")
    script.timelines = [StepTimeline((9, 1, 1, 1), 10)] * 2
    for _ in range(5):
        play(steps, "ABbb")
    assert play(steps, "ABba") == [1, 3, 1, 4]
    assert play(steps, "ABbb") == [1, 3, 1, 9]


def test_what_never_comes_twice_is_not_recorded_for_ever() -> None:
    script = Script()
    steps = Steps(script, StepTimeline.budgets)
    for _ in range(3 * MOST_TRIES):
        play(steps, "ABba")
        play(steps, "CDdc")
    play(steps, "A")
    assert script.starts <= 2 * MOST_TRIES and not script.running


def test_no_recording_begins_at_the_call_where_another_ends() -> None:
    """The operators around that call would begin under the one and end under the other."""
    script = Script(StepTimeline((5, 7, 9, 6), 10), StepTimeline((5, 7, 9, 6), 10))
    steps = Steps(script, StepTimeline.budgets)
    for step in ("ABba", "ABba", "CDdc", "CDdc", "CDdc", "ABba", "CDdc", "CDdc", "CDdc", "CDdc", "CDdc", "ABba"):
        for name in step:
            starts, was_running = script.starts, script.running
            steps.call(name, name.isupper(), 0)
            assert not (was_running and script.starts > starts)
    assert script.starts > 1 and not script.running


def test_a_program_that_only_goes_forward_has_no_steps() -> None:
    script = Script()
    assert play(Steps(script, StepTimeline.budgets), "AB" * 50) == [None] * 100
    assert script.starts == 0


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["ABba", "Aa", "ABCcba", "ABb"]), max_size=40))
def test_budgets_are_those_of_what_was_recorded(program: list[str]) -> None:
    class Recording(Script):
        def mark(self, size: int) -> None:
            if self.steps:
                self.timelines[self.steps - 1] += (size,)  # type: ignore[operator]

        def step(self) -> None:
            super().step()
            self.timelines = [*self.timelines, ()] if self.steps > 1 else [()]  # type: ignore[list-item]

        def stop(self) -> list[StepTimeline]:
            self.running = False
            return [StepTimeline(tuple(live), 100) for live in self.timelines[:-1]]  # type: ignore[arg-type]

    sizes = {letter: 2 * place for place, letter in enumerate("ABCabc")}
    steps = Steps(Recording(), StepTimeline.budgets)
    for step in program:
        for letter in step:
            budget = steps.call(letter, letter.isupper(), sizes[letter])
            assert budget in (None, 100 - sizes[letter])


def test_so_many_recorded_steps_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mucudnn.budgets.steps.MOST_STEPS", 2)
    steps = Steps(Script(*[StepTimeline((5, 7), 10)] * 2), StepTimeline.budgets)
    for names in ("Aa", "Bb", "Cc", "Dd"):
        for _ in range(6):
            play(steps, names)
        assert play(steps, names) == [5, 3]
    play(steps, "Dd")
    assert len(steps.known) == 2
    assert play(steps, "Aa") == [None, None]
