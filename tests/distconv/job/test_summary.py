"""What a job says at its end: what its ranks held, sent and waited for."""

from __future__ import annotations

import contextlib
import mmap
import os
import pty
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import ENVIRONMENT, command, launch
from ranks import Ranks

import distconv
from distconv.job.summary import RankFigures, StepCounts, at_good_end, sentences, summed_up_in_turn
from distconv.settings.partition import Partition
from distconv.transfer import group_calls
from distconv.transfer.account import ACCOUNT, most_used_bytes, used_bytes
from distconv.transfer.collectives import AllReduce, all_reduced, gather_into, scatter_sum_into
from distconv.transfer.route import AllToAll
from distconv.turns.parts import parts_of
from mucudnn.sizes import format_bytes

MIB = 1 << 20
PAIR = Partition.parse("height=2")
SHARE = RankFigures(600 * MIB, 300 * MIB, 100 * MIB, 100 * MIB, 3 * MIB, 0.1, 20, True)


@pytest.mark.parametrize(
    ("shares", "lines"),
    [
        (
            [SHARE, replace(SHARE, peak=700 * MIB, waited=0.2, sent=2.0 * MIB)],
            [
                # What is kept once, and what the two hold beside that: 300 + 100 + 200 + 300 MiB.
                "2 ranks (height=2), 20 steps: memory of a rank at most 700 MiB; one process would need about 900 MiB",
                "a rank sent at most 3 MiB per step; ranks waited for others in 15% of their time (10% to 20%)",
            ],
        ),
        (
            [replace(SHARE, waited=None, steps=1, is_training=False)],
            [
                "2 ranks (height=2), 1 call of the model: memory of a rank at most 600 MiB; one process would need "
                "about 600 MiB",
                "a rank sent at most 3 MiB per call of the model",
            ],
        ),
        ([replace(SHARE, steps=0)], ["2 ranks (height=2): no model was called"]),
    ],
    ids=["training", "inference", "nothing"],
)
def test_the_sentences(shares: list[RankFigures], lines: list[str]) -> None:
    assert sentences(PAIR, shares) == lines


def test_where_ranks_wait_long_something_is_to_be_typed_next() -> None:
    (*_, last) = sentences(PAIR, [replace(SHARE, waited=0.5)])
    assert "--partition auto" in last


def counted(rank_sends: Any) -> tuple[int, float]:
    sent, waited = ACCOUNT.sent, ACCOUNT.waited
    rank_sends()
    return ACCOUNT.sent - sent, ACCOUNT.waited - waited


def every_collective() -> dict[str, tuple[int, float]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.zeros(12, dtype=torch.float64)
    counts = [rank] * size  # what a rank keeps does not count
    received = torch.zeros(sum(range(size)), dtype=torch.float64)
    parts = parts_of(Partition.parse("height=2"), "cpu")
    return {
        "all to all": counted(
            lambda: AllToAll(received, x.new_zeros(rank * size), list(range(size)), counts, None).wait()
        ),
        "sum": counted(lambda: all_reduced(x, None)),
        "begun sum": counted(lambda: AllReduce(x, None).wait()),
        "gather": counted(lambda: group_calls.wait(gather_into(x.new_zeros(size * 12), x, None))),
        "parts of a sum": counted(lambda: group_calls.wait(scatter_sum_into(x[: 12 // size].clone(), x, None))),
        "sum over parts in turn": counted(lambda: parts.run(lambda part: all_reduced(x, None))),
    }


def test_what_a_rank_sends_is_counted(ranks: Any) -> None:
    pool: Ranks = ranks(4)
    for rank, found in enumerate(pool.run(every_collective)):
        assert found.pop("sum over parts in turn") == (0, 0)
        sent = {name: each[0] for name, each in found.items()}
        assert sent == {"all to all": 8 * 3 * rank, "sum": 144, "begun sum": 144, "gather": 288, "parts of a sum": 72}
        assert all(waited > 0 for _, waited in found.values())


def test_memory_that_was_given_back_counts_in_the_peak_alone() -> None:
    before = used_bytes()
    pages = mmap.mmap(-1, 64 * MIB)  # fresh ones: an allocator may have as much left from earlier tests
    torch.frombuffer(pages, dtype=torch.uint8).fill_(1)
    assert used_bytes() >= before + 60 * MIB
    pages.close()
    assert used_bytes() < before + 60 * MIB
    assert most_used_bytes() >= before + 60 * MIB


def test_a_job_reports_on_a_terminal(tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(
        "import sys, torch\nnet = torch.nn.Conv2d(1, 2, 3, padding=1)\n"
        "for _ in range(3):\n    net(torch.zeros(1, 1, 8, 8))\nsys.exit(0)\n"
    )
    limit = {"MUCUDNN_WORKSPACE_LIMIT": "1MiB", "MUCUDNN_DATABASE": ":memory:"}
    words = command("alone", 2, "--partition", "height=2", str(script), fresh=True)
    ours, theirs = pty.openpty()
    job = subprocess.run(words, env=ENVIRONMENT | limit, stdin=theirs, stdout=theirs, stderr=theirs, timeout=240)
    os.close(theirs)
    lines = os.read(ours, 1 << 16).decode().splitlines()
    os.close(ours)
    assert job.returncode == 0, lines
    assert re.match(
        r"distconv: 2 ranks \(height=2\), 3 calls of the model: memory of a rank at most [\d.]+ MiB", lines[0]
    )
    assert "mucudnn on rank 0: 1 convolution called (by shape and direction): 1 by torch's own kernel" in lines


STEPS = """
import torch

net = torch.nn.Conv2d(64, 64, 3, padding=1, bias=False)
optimizer = torch.optim.Adam(net.parameters())
for _ in range(3):
    net(torch.ones(2, 64, 8, 8)).sum().backward()
    optimizer.step()
"""


def test_parameters_in_shards_are_counted(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS)
    # A ring of two adds up 144 KiB by sending as many. With the option a rank sends its half of the parameter twice,
    # and half of its share of the gradient. Its half of the result takes 16 KiB.
    for options, sent in ([], "160 KiB"), (["--shard-parameters"], "232 KiB"):
        job = launch("alone", 2, "--partition", "sample=2", "--summary", "--check", "off", *options, str(script))
        assert job.returncode == 0, job.stderr
        assert f"distconv: a rank sent at most {sent} per step; ranks waited" in job.stderr, job.stderr


def kept_from_step_to_step(shard_parameters: bool) -> list[int]:
    mesh = distconv.init("sample=2", device_type="cpu")
    net = distconv.parallelize(torch.nn.Conv2d(64, 64, 3, bias=False), mesh, shard_parameters=shard_parameters)
    optimizer, steps = torch.optim.Adam(net.parameters()), StepCounts()
    net(distconv.shard(torch.ones(2, 64, 8, 8), mesh)).sum().backward()
    optimizer.step()
    steps.stepped(optimizer)
    return [steps.kept, steps.kept_whole]


def test_gradients_and_states_in_shards_are_those_of_a_rank_and_of_one_process(ranks: Any) -> None:
    whole = 3 * 4 * 64 * 64 * 9
    for shard_parameters, own in (False, whole), (True, whole // 2):
        for kept, kept_whole in ranks(2).run(kept_from_step_to_step, shard_parameters):
            assert (kept, kept_whole) == (own + 4, whole + 4)  # Adam's count of steps


@pytest.mark.parametrize(
    ("end", "is_told"),
    [(None, True), (SystemExit(0), True), (SystemExit(), True), (SystemExit("no"), False), (OSError(), False)],
    ids=["end", "exit 0", "exit", "message", "error"],
)
def test_a_job_that_fails_reports_nothing(end: BaseException | None, is_told: bool) -> None:
    lines: list[str] = []
    with contextlib.suppress(SystemExit, OSError), at_good_end(lambda: lines.append("told")):
        if end is not None:
            raise end
    assert bool(lines) == is_told


def test_a_script_in_turn_reports_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    for wanted in (True, None, False):
        layer = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)
        with summed_up_in_turn("parts height=2 in turn", wanted):
            for _ in range(2):
                layer(torch.ones(1, 2)).sum().backward()
                optimizer.step()
    told = (
        f"distconv: parts height=2 in turn, 2 steps: memory of the process at most {format_bytes(most_used_bytes())}\n"
    )
    assert capsys.readouterr().err == told
