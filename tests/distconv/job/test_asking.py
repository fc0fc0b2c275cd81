"""A running job tells where its ranks are, and writes a timeline of them at its end."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

from jobs import command, started

from distconv.job.standstill import RankState, Waiting
from distconv.job.trace import merged_trace
from distconv.job.whereabouts import sentences_about

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


def recorded(process: int, begin: int) -> dict[str, Any]:
    def event(kind: str, of: Any, **more: Any) -> dict[str, Any]:
        return {"ph": kind, "pid": of, "tid": 1, "name": kind, **more}

    events = [
        event("X", process, ts=5.0, dur=1.0),
        event("s", process, ts=5.5, id=7),
        event("f", 0, ts=6.0, id=7),  # on a GPU
        event("X", "Spans", ts=5.0),
        event("M", process, args={"name": "python"}),
    ]
    return {"traceEvents": events, "baseTimeNanoseconds": begin, "process": process}


def test_recordings_become_one() -> None:
    found = merged_trace([recorded(100, 1000), recorded(200, 4000)])["traceEvents"]
    of = [event for event in found if event["ph"] in "Xsf"]
    assert [(event["pid"], event["ts"], event.get("id")) for event in of] == [
        *((0, 5.0, None), (0, 5.5, "0/7"), (1, 6.0, "0/7")),
        *((1000, 8.0, None), (1000, 8.5, "1/7"), (1001, 9.0, "1/7")),
    ]
    names = {event["pid"]: event["args"]["name"] for event in found if event["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 0, GPU 0", 1000: "rank 1", 1001: "rank 1, GPU 0"}


def test_a_job_is_asked_and_leaves_a_trace(tmp_path: Path) -> None:
    script, go_on, trace = tmp_path / "waits.py", tmp_path / "go_on", tmp_path / "trace.json"
    script.write_text(
        "import os, time, torch, distconv\nnet = torch.nn.Conv2d(1, 2, 3, padding=1)\n"
        "net(torch.zeros(1, 1, 8, 8))\nprint('ready', flush=True)\n"
        f"while distconv.is_first() and not os.path.exists({str(go_on)!r}):\n    time.sleep(0.1)\n"
        "net(torch.zeros(1, 1, 8, 8))\n"
    )
    words = command("alone", 2, "--trace", str(trace), "--partition", "height=2", str(script), fresh=True)
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
    events = json.loads(trace.read_text())["traceEvents"]
    for rank in (0, 1000):
        names = {event["name"] for event in events if event["pid"] == rank}
        assert {"aten::convolution", "waiting for other ranks", "gloo:all_to_all"} <= names
