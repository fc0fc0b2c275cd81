"""Other threads of Python compute while mucudnn plans in Python."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.nn import functional

import mucudnn
from mucudnn.planning.trial_runner import TrialRunner
from mucudnn.process import SWITCH_SECONDS


@pytest.mark.parametrize("planning", ["live", "ahead"])
def test_other_threads_take_turns_more_often_while_convolutions_are_planned(
    planning: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, run = set[float](), TrialRunner.run

    def noted(runner: TrialRunner, *given: Any, **named: Any) -> object:
        seen.add(sys.getswitchinterval())
        return run(runner, *given, **named)

    monkeypatch.setattr(TrialRunner, "run", noted)
    before = sys.getswitchinterval()
    with mucudnn.patched(planning=planning, workspace_limit="1MiB"):
        functional.conv2d(torch.ones(4, 32, 48, 48).double(), torch.ones(32, 32, 3, 3).double())
    assert seen and max(seen) <= SWITCH_SECONDS < before == sys.getswitchinterval()
