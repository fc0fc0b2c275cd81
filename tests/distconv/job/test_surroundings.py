"""What a script draws and is told on many ranks, under every launcher; in one process, the streams themselves."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import uuid

import numpy as np
import pytest
import torch
from jobs import ENVIRONMENT, SCRIPTS, WAYS, launch

from distconv.job.hash_seed import common_seed, drawn_seed, settle_seed
from distconv.job.one_process import is_hidden
from distconv.job.random_state import Entropy, common_entropy, set_generators, state_of_generators
from tests.forked_python import run_python

ASKS = str(SCRIPTS / "asks.py")


def answers(text: str) -> list[dict]:
    return [json.loads(line[line.index("{") :]) for line in text.splitlines()]


@pytest.fixture(scope="module")
def plain() -> dict:
    done = subprocess.run([sys.executable, ASKS], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return answers(done.stdout)[0]


@pytest.mark.parametrize("way", WAYS)
def test_ranks_draw_the_same_and_see_one_process(way, plain):
    done = launch(way, 2, "--print-all-ranks", "--partition", "height=2", ASKS, fresh=True)
    assert done.returncode == 0, done.stderr
    first, second = answers(done.stdout)
    assert first["drawn"] == second["drawn"]
    # A plain run is told the same; and runs without a seed differ from each other.
    for told in (first["told"], second["told"]):
        assert told.pop("MPI", 1) == 1
        assert told == plain["told"]
    for name, value in plain["drawn"].items():
        assert first["drawn"][name] != value, name


def test_show_ranks_leaves_all_visible():
    done = launch("alone", 2, "--show-ranks", "--print-all-ranks", "--partition", "height=2", ASKS)
    assert done.returncode == 0, done.stderr
    for answer in answers(done.stdout):
        assert answer["told"]["initialized"] and answer["told"]["accelerate"]
        assert answer["told"]["variables"][:4] == ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"]
        assert answer["told"]["get_rank"] == "none"


GROUP = """import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=2)
"""


def test_a_process_group_of_several_is_refused_in_one_line(tmp_path):
    script = tmp_path / "own.py"
    script.write_text(GROUP)
    done = launch("alone", 2, "--partition", "height=2", str(script))
    assert done.returncode == 2
    assert "own.py:2: torch.distributed.init_process_group" in done.stderr and "--show-ranks" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_group_of_one_process_is_the_scripts_own():
    script = str(SCRIPTS / "group_of_one.py")
    plain = run_python(script, env=ENVIRONMENT)
    done = launch("alone", 2, "--partition", "height=2", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout and plain.stdout.count("\n") == 8
    assert done.stderr.count("in its world of one process, so each rank computes all of it") == 2


# In one process.


def drawn_without_seeds() -> list[object]:
    random.seed()
    np.random.seed()
    torch.seed()
    return [
        np.random.default_rng().random(),
        np.random.RandomState().rand(),
        random.Random().random(),
        random.SystemRandom().random(),
        uuid.uuid4(),
        os.urandom(8),
        random.random(),
        np.random.rand(),
        torch.rand(3).tolist(),
    ]


def test_what_has_no_seed_takes_it_from_the_key():
    before = state_of_generators()
    try:
        runs = []
        for key in (b"a", b"a", b"b"):
            set_generators(before)  # numpy.random.seed() goes on from the position in the old state
            with common_entropy(key):
                runs.append(drawn_without_seeds())
        assert runs[0] == runs[1]
        assert all(one != other for one, other in zip(runs[0], runs[2], strict=True))
        assert all(one != other for one, other in zip(runs[0], drawn_without_seeds(), strict=True))
    finally:
        set_generators(before)


def test_a_seed_that_is_given_counts():
    with common_entropy(b"a"):
        assert random.Random(5).random() == pytest.approx(0.6229016948897019)
        within = np.random.default_rng(5).random(), np.random.RandomState(5).rand()
    assert within == (np.random.default_rng(5).random(), np.random.RandomState(5).rand())


def test_one_purpose_does_not_disturb_another():
    disturbed, quiet = Entropy(b"a"), Entropy(b"a")
    disturbed.draw("system", 5)
    assert disturbed.draw("numpy", 16) == quiet.draw("numpy", 16)
    assert disturbed.draw("numpy", 16) != disturbed.draw("numpy", 16)


def test_forked_processes_draw_apart_but_the_same_on_every_rank():
    def children() -> list[bytes]:
        entropy, drawn = Entropy(b"a"), []
        for _ in range(2):
            entropy.forking()
            child = Entropy(b"a")
            child._forks = entropy._forks
            child.forked()
            drawn.append(child.draw("numpy", 8))
        return [*drawn, entropy.draw("numpy", 8)]

    first, second = children(), children()
    assert first == second and len(set(first)) == 3


def test_generators_take_anothers_state():
    mine = state_of_generators()
    try:
        drawn = torch.rand(2).tolist(), random.random(), np.random.rand()
        set_generators(mine)
        assert drawn == (torch.rand(2).tolist(), random.random(), np.random.rand())
    finally:
        set_generators(mine)


def test_hash_seeds_of_ranks():
    torchrun = {"TORCHELASTIC_RUN_ID": "x", "MASTER_PORT": "7", "RANK": "0"}
    assert common_seed(torchrun) == common_seed({**torchrun, "RANK": "1"})
    assert common_seed(torchrun) != common_seed({**torchrun, "MASTER_PORT": "8"})
    assert common_seed({"PMI_RANK": "1"}) == common_seed({"PMI_RANK": "0", "PYTHONHASHSEED": "random"}) == "0"
    assert common_seed({"PYTHONHASHSEED": "5", **torchrun}) == drawn_seed({"PYTHONHASHSEED": "5"}) == "5"
    assert drawn_seed({}) != drawn_seed({})


def test_importing_the_package_starts_nothing_anew(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError("started anew")

    monkeypatch.setattr(os, "execv", fail)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    settle_seed()
    monkeypatch.setattr(sys, "argv", ["-m", "run"])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "distconv", "run"])
    with pytest.raises(AssertionError, match="started anew"):
        settle_seed()
    assert os.environ.pop("PYTHONHASHSEED") == "0"
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/distconv", "run"])
    monkeypatch.setattr(sys, "orig_argv", ["python", *sys.argv])
    with pytest.raises(AssertionError, match="started anew"):
        settle_seed()
    settle_seed()  # once


@pytest.mark.parametrize(
    ("variable", "hidden"),
    [
        ("RANK", True),
        ("ROLE_WORLD_SIZE", True),
        ("OMPI_COMM_WORLD_RANK", True),
        ("PMI_FD", True),
        ("SLURM_NTASKS_PER_NODE", True),
        ("SLURM_JOB_ID", False),
        ("NCCL_DEBUG", False),
        ("RANKING", False),
        ("PYTHONHASHSEED", False),
    ],
)
def test_which_variables_tell_of_ranks(variable, hidden):
    assert is_hidden(variable) is hidden
