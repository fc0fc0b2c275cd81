from __future__ import annotations

import json
import os
import re
import sys

import pytest
import torch
from jobs import ENVIRONMENT, SCRIPTS, TRAIN, WAYS, launch, needs_mpi

from distconv import __main__ as command_line
from distconv import settings
from distconv.job.launcher import divides_locally
from distconv.place import Place, find_place
from mucudnn import spelling
from mucudnn.reporting.record import Outcome
from tests.forked_python import run_python

HELLO, SHARES = (str(SCRIPTS / name) for name in ("hello.py", "shares.py"))


# How a script runs.


@pytest.mark.parametrize("way", WAYS)
def test_a_script_sees_its_arguments_and_prints_once(way):
    done = launch(way, 2, "--partition", "height=2", HELLO, "ok", "--partition=own", "-m", "x", fresh=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "hello __main__ ['--partition=own', '-m', 'x']\nend\n"


def test_a_module_and_every_ranks_output():
    done = launch(
        "alone", 2, "--print-all-ranks", "-m", "tests.distconv.scripts.hello", "ok", "x", DISTCONV_PARTITION="height=2"
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0] end",
        "[0] hello __main__ ['x']",
        "[1] end",
        "[1] hello __main__ ['x']",
    ]


@needs_mpi
def test_mpi_without_mpiexec_and_gloo_under_mpiexec():
    done = launch("alone", 2, "--backend", "mpi", "--partition", "height=2", HELLO, "ok")
    assert (done.returncode, done.stdout) == (0, "hello __main__ []\nend\n"), done.stderr
    done = launch("mpiexec", 2, "--partition", "height=2", HELLO, "ok", DISTCONV_BACKEND="gloo")
    assert (done.returncode, done.stdout) == (0, "hello __main__ []\nend\n"), done.stderr


# What cannot be run.

BAD = [
    ("--partition hight=2 {hello}", "unknown axis 'hight'"),
    ("--partition height=two {hello}", "'two' is not a number of ranks"),
    ("--partition height=2 --nproc 3 {hello}", "needs 2 ranks, but --nproc is 3"),
    ("--partition auto --nproc 0 {hello}", "--nproc 0: accepted: 1 or more"),
    ("--partition height=2 nowhere.py", "there is no script 'nowhere.py'"),
    ("--partition height=2 -m no.where", "there is no module 'no.where'"),
    ("--partition height=2 --backend smoke {hello}", "--backend='smoke': accepted is gloo, nccl, mpi"),
    ("--partition channel=2 --shard-data {hello}", "--shard-data needs an axis sample or one of space"),
    ("--partition height=2 --batch-norm none {hello}", "invalid choice: 'none'"),
    ("--partition channel=2 --channel-algorithm z {hello}", "--channel-algorithm='z': accepted is x, y, w, auto"),
    ("--partition channel=2 --channel-algorithm w {hello}", "accepted with axes channel and filter"),
    ("--partition height=2 --report {hello}.json {hello}", "--report writes what mucudnn chose: it needs"),
    ("--partition height=2", "required: SCRIPT; see python -m distconv run --help"),
    ("--partiton height=2 {hello}", "--partiton (did you mean --partition?); see python -m distconv run --help"),
    ("--parts rows=2 {hello}", "accepted: axis=parts,... with axes sample, depth, height, width"),
    ("--parts height=x {hello}", "'x' is not a number of parts"),
    ("--partition channel=2 --parts height=2 {hello}", "accepted: axis=ranks,... with axes sample, depth"),
    ("{hello}", "no partition"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_line(arguments, message, monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith(("DISTCONV", "PMI", "OMPI")) or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "argv", ["distconv", "run", *arguments.format(hello=HELLO).split()])
    assert command_line.main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err and printed.err.count("\n") == 1


@pytest.mark.parametrize("how", ["--partition height=2", "--parts height=2"])
def test_a_variable_of_a_setting_is_checked_before_the_script_runs(how, monkeypatch, capsys):
    monkeypatch.setenv("DISTCONV_CHECK", "maybe")
    monkeypatch.setattr(sys, "argv", ["distconv", "run", *how.split(), HELLO])
    assert command_line.main() == 2
    assert capsys.readouterr().err == "distconv: DISTCONV_CHECK='maybe': accepted is on, off\n"
    monkeypatch.setattr(sys, "argv", ["distconv", "run", "--check", "on", "--partition", "height=2", "missing.py"])
    assert command_line.main() == 2
    assert "there is no script" in capsys.readouterr().err, "the option wins"


@pytest.mark.parametrize("name", ["WORKSPACE_LIMIT", "MEMORY_LIMIT", "TOTAL_WORKSPACE_SIZE"])
def test_any_limit_lets_mucudnn_divide_what_is_local(name, monkeypatch, capsys):
    assert not divides_locally()
    monkeypatch.setenv(f"MUCUDNN_{name}", "64MiB")
    assert divides_locally()
    monkeypatch.setenv(f"MUCUDNN_{name}", "lots")
    monkeypatch.setattr(sys, "argv", ["distconv", "run", "--partition", "height=2", HELLO])
    assert command_line.main() == 2
    printed = capsys.readouterr().err
    assert f"MUCUDNN_{name}='lots': accepted is" in printed and printed.count("\n") == 1


def test_variables_that_nobody_reads_are_reported_once_in_a_job(monkeypatch, capsys):
    monkeypatch.setattr(spelling, "_reported", set())
    monkeypatch.setattr(sys, "argv", ["distconv", "run", "--partition", "heigth=2", HELLO])
    for name in ("MUCUDNN_WORKSPACE_LIMT", "DISTCONV_CHEK"):
        monkeypatch.setenv(name, "on")
    assert command_line.main() == 2
    typo, limit, axis = capsys.readouterr().err.splitlines()
    assert "DISTCONV_CHEK is not read (did you mean DISTCONV_CHECK?)" in typo
    assert "MUCUDNN_WORKSPACE_LIMT is not read (did you mean MUCUDNN_WORKSPACE_LIMIT?)" in limit
    assert "unknown axis 'heigth' (did you mean height?); accepted: axis=ranks" in axis
    monkeypatch.setattr(spelling, "_reported", set())
    monkeypatch.setenv("DISTCONV_FILES", "/tmp")  # as a process of a job that has told it
    settings.report_unknown_variables()
    assert capsys.readouterr().err == ""


def test_a_program_started_alone_is_shown_how_to_start():
    program = "import distconv; distconv.init('sample=2,height=2')"
    done = run_python("-c", program, env=ENVIRONMENT)
    assert "[rank0]" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert (
        "needs 4 ranks, and this process was started alone; start the program with: torchrun --nproc-per-node 4" in last
    )
    done = run_python("-c", program, env={**ENVIRONMENT, "PMI_RANK": "0", "PMI_SIZE": "4"})
    assert "was started by MPI: set DISTCONV_BACKEND=mpi, or start the program with" in done.stderr.splitlines()[-1]
    program = "import distconv; distconv.init('auto')"
    done = run_python("-c", program, env={**ENVIRONMENT, "PMI_RANK": "0", "PMI_SIZE": "4"})
    last = done.stderr.splitlines()[-1]
    assert "partition 'auto' is for all ranks" in last and last.endswith("torchrun --nproc-per-node 4 -c")
    assert run_python("-c", program, env={**ENVIRONMENT, "PMI_RANK": "0", "PMI_SIZE": "1"}).returncode == 0


@needs_mpi
def test_mpi_without_its_library_is_one_line():
    done = launch(
        "alone", 2, "--backend", "mpi", "--partition", "height=2", HELLO, fresh=True, MPI4PY_LIBMPI="/no/libmpi.so"
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("distconv: ranks over MPI need mpi4py and an MPI library: cannot load MPI library")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_nccl_without_a_gpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["distconv", "run", "--backend", "nccl", "--partition", "height=2", HELLO])
    assert command_line.main() == 2
    assert "backend 'nccl' needs a GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--partition", "height=3", HELLO], "needs 3 ranks, but there are 2 ranks"),
        (["--partition", "height=2", "nowhere.py"], "there is no script"),
        (["--partition", "depth=2", TRAIN], "has no depth"),
    ],
)
@needs_mpi
def test_bad_input_is_one_line_on_one_rank(arguments, message):
    done = launch("mpiexec", 2, *arguments)
    assert done.returncode == 2
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_data_that_does_not_fit_is_one_line():
    done = launch("alone", 2, "--partition", "depth=2", TRAIN)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"distconv: .*train\.py:\d+: partition axis depth=2: .* no depth.* strategy .*\n", done.stderr)


def test_help_teaches(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["distconv", "run", "--help"])
    with pytest.raises(SystemExit, match="0"):
        command_line.main()
    text = capsys.readouterr().out
    for word in ("mpiexec -n 4", "torchrun", "DISTCONV_PARTITION", "MUCUDNN_WORKSPACE_LIMIT", "--shard-data"):
        assert word in text


TORCHRUN = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        ({"RANK": "3"}, None),
        (TORCHRUN, Place(3, 4, 1, mpi=False)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, Place(1, 2, 0, mpi=True)),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, Place(1, 4, 1, mpi=True)),
        ({"PMIX_RANK": "2"}, Place(2, None, 2, mpi=True)),
    ],
)
def test_where_a_rank_finds_itself(environment, place):
    assert find_place(environment) == place


# What a distributed script computes.


def losses(output: str) -> list[float]:
    return [float(line.split()[-1]) for line in output.splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, list[float]]:
    def run(task: str) -> list[float]:
        return losses(run_python(TRAIN, "--task", task, env=ENVIRONMENT).stdout)

    return {task: run(task) for task in ("classes", "pixels")}


@pytest.mark.parametrize(
    ("way", "task", "partition", "options"),
    [
        ("alone", "classes", "width=2,sample=2", ["--shard-data"]),
        ("alone", "pixels", "sample=2,height=2", []),
        ("alone", "pixels", "sample=2,height=2", ["--shard-data"]),
        pytest.param("mpiexec", "pixels", "height=2", [], marks=needs_mpi),
        pytest.param("mpiexec", "classes", "sample=2", ["--shard-data"], marks=needs_mpi),
        ("torchrun", "pixels", "height=2", []),
    ],
)
def test_losses_are_those_of_one_process(alone, way, task, partition, options):
    ranks = 4 if "," in partition else 2
    done = launch(way, ranks, "--partition", partition, *options, TRAIN, "--task", task)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(alone[task], rel=1e-9)


# Beneath it, mucudnn.

LIMITS = ["WORKSPACE_LIMIT=64MiB", "WORKSPACE_LIMIT=peak", "MEMORY_LIMIT=8GiB", "TOTAL_WORKSPACE_SIZE=64MiB"]


@pytest.mark.parametrize("limit", LIMITS)
def test_losses_are_the_same_within_any_limit(alone, limit):
    name, value = limit.split("=")
    within = {f"MUCUDNN_{name}": value, "MUCUDNN_DATABASE": ":memory:"}
    done = launch("alone", 2, "--partition", "height=2", TRAIN, "--task", "pixels", **within)
    assert done.returncode == 0, done.stderr
    assert losses(done.stdout) == pytest.approx(alone["pixels"], rel=1e-9)


@pytest.mark.parametrize("limit", ["WORKSPACE_LIMIT=64MiB", "TOTAL_WORKSPACE_SIZE=64MiB"])
def test_ranks_share_the_times_that_they_plan_with(limit, tmp_path):
    name, value = limit.split("=")
    within = {f"MUCUDNN_{name}": value, "MUCUDNN_DATABASE": ":memory:", "MUCUDNN_PLANNING": "ahead"}
    report = tmp_path / "plans.json"
    options = ("--print-all-ranks", "--report", str(report), "--partition", "sample=2")
    done = launch("alone", 2, *options, SHARES, **within)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    first, second = ([line[4:] for line in lines if line.startswith(f"[{rank}] ")] for rank in (0, 1))
    assert first == second and len(first) == 2
    records = Outcome.from_json(json.loads(report.read_text())).records
    assert [f"{r.direction} {r.division} {r.seconds} {r.stock_seconds}" for r in records] == first
    assert all(record.problem.x_shape[0] == 4 for record in records), "the shard of rank 0"


def test_a_report_that_cannot_be_written_is_one_line(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("MUCUDNN_WORKSPACE_LIMIT", "64MiB")
    nowhere = str(tmp_path / "missing" / "plans.json")
    monkeypatch.setattr(sys, "argv", ["distconv", "run", "--partition", "height=2", "--report", nowhere, HELLO])
    assert command_line.main() == 2
    printed = capsys.readouterr().err
    assert f"cannot write --report {nowhere}" in printed and printed.count("\n") == 1
