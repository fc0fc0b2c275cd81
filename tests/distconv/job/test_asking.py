"""A running job tells where its ranks are."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from jobs import command, started

from distconv.job.whereabouts import RankState, Waiting, sentences_about

WAITS = RankState({"world": 3}, Waiting("all_reduce", "world", 3, (0, 1), 12.4), "train.py:31")


def test_a_line_for_each_rank_and_one_for_what_holds_them_up() -> None:
    assert sentences_about({0: WAITS, 1: RankState({"world": 2}, None, "train.py:40")}, 3) == [
        "rank 0 of 3: at train.py:31, for 12 s in all_reduce among ranks 0 and 1",
        "rank 1 of 3: at train.py:40, in no collective",
        "rank 2 of 3: does not answer: it is starting or ending, or its Python is blocked",
        "all_reduce among ranks 0 and 1 at train.py:31 has waited 12 s for rank 1, at train.py:40",
    ]
    assert sentences_about({0: RankState({}, None, "")}, 1) == [
        "rank 0 of 1: at no line of the script, in no collective"
    ]


def test_a_job_is_asked(tmp_path: Path) -> None:
    script, go_on = tmp_path / "waits.py", tmp_path / "go_on"
    script.write_text(
        "import os, time, torch, distconv\nnet = torch.nn.Conv2d(1, 2, 3, padding=1)\n"
        "net(torch.zeros(1, 1, 8, 8))\nprint('ready', flush=True)\n"
        f"while distconv.is_first() and not os.path.exists({str(go_on)!r}):\n    time.sleep(0.1)\n"
        "net(torch.zeros(1, 1, 8, 8))\n"
    )
    words = command("alone", 2, "--partition", "height=2", str(script), fresh=True)
    (tmp_path / "temporary").mkdir()
    with started(words, tmp_path / "temporary") as job:
        job.await_line("ready")
        job.process.send_signal(signal.SIGQUIT)
        assert job.process.stderr is not None
        lines = [job.process.stderr.readline() for _ in range(2)]
        assert re.fullmatch(r"distconv: rank 0 of 2: at .*waits.py:[56], in no collective\n", lines[0]), lines
        assert re.match(r"distconv: rank 1 of 2: at .*waits.py:7, (for \d+ s|in no)", lines[1]), lines
        go_on.touch()
        code, _, _ = job.end()
    assert code == 0
