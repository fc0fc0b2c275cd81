"""How a job ends when a rank fails: what is told, with which exit code, and that nothing is left."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import signal
import sys

import pytest
import torch
import torch.distributed as dist
from jobs import ENVIRONMENT, SCRIPTS, WAYS, command, hear_interrupts, needs_mpi, started

from distconv.job.handlers import common_handlers

FAULTS, HANDLES = str(SCRIPTS / "faults.py"), str(SCRIPTS / "handles.py")
TWO = ["alone", pytest.param("mpiexec", marks=needs_mpi)]


def job(way: str, *arguments: str, fresh: bool = False) -> list[str]:
    """mpiexec kills a rank soon after it has asked it to end: what stands for the rank would end too late."""
    fresh = fresh or way == "mpiexec"
    return command(way, 2, "--show-ranks", "--partition", "height=2", *arguments, fresh=fresh)


def told(errors: str) -> list[str]:
    return [line for line in errors.splitlines() if line.startswith("distconv: ")]


@pytest.mark.parametrize("way", WAYS)
def test_a_killed_rank_is_named_first_and_ends_the_others(way, tmp_path):
    with started(job(way, FAULTS, "kill", "--child", fresh=True), tmp_path) as running:
        code, _, errors = running.end()
    assert told(errors) == ["distconv: rank 1 of 2 was killed (signal 9)"]
    if way == "torchrun":  # which shows a traceback of its own
        assert code != 0 and errors.index("distconv: ") < errors.index("Traceback")
    else:
        assert errors == "distconv: rank 1 of 2 was killed (signal 9)\n"
        assert code == 128 + signal.SIGKILL


LATE = """
import os, signal, sys
if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
    os.kill(os.getpid(), signal.SIGKILL)
sys.path.remove(os.path.dirname(os.path.dirname(__file__)))
del sys.modules["mpi4py"]
import mpi4py
"""


@needs_mpi
def test_a_rank_that_is_killed_before_the_ranks_have_met_ends_the_others(tmp_path):
    """mpiexec does not know the rank yet: it would wait for the others, and these for the rank."""
    temporary, package = tmp_path / "temporary", tmp_path / "instead" / "mpi4py"
    temporary.mkdir(), package.mkdir(parents=True)
    (package / "__init__.py").write_text(LATE)
    path = os.pathsep.join((str(package.parent), ENVIRONMENT["PYTHONPATH"]))
    with started(job("mpiexec", FAULTS, "stay"), temporary, PYTHONPATH=path) as running:
        code, _, errors = running.end()
    assert code != 0 and told(errors) == ["distconv: rank 1 of 2 was killed (signal 9)"]


def test_what_a_crashed_rank_wrote_is_shown(tmp_path):
    with started(job("alone", FAULTS, "crash"), tmp_path) as running:
        code, _, errors = running.end()
    assert code == 128 + signal.SIGABRT
    first, second, *_ = errors.splitlines()
    assert first == "distconv: rank 1 of 2 was killed (signal 6)" and second == "written beneath Python"


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    with started(job("alone", FAULTS, "stay", "--child", fresh=True), tmp_path) as running:
        running.await_line("started")
        assert len(running.processes()) >= 6  # two of the launcher, two ranks, a child of each
        running.process.kill()
        running.await_nothing_left()


@pytest.mark.parametrize("way", TWO)
@pytest.mark.parametrize("options", [(), ("--all",)], ids=["one", "all"])
def test_an_exception_is_shown_once_as_python_shows_it(way, options, tmp_path):
    with started(job(way, FAULTS, "fail", *options), tmp_path) as running:
        code, printed, errors = running.end()
    assert code == 1
    if way == "alone" and not options:  # MPI's own end would wait for the others
        assert printed.endswith("left\n")
    lines = errors.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert re.fullmatch(rf'  File "{re.escape(FAULTS)}", line \d+, in <module>', lines[1])
    assert lines[-1 if options else -2] == "RuntimeError: no luck"
    assert errors.count("Traceback") == 1
    if not options:
        assert lines[-1] == "distconv: on rank 1 of 2"


@pytest.mark.parametrize("way", TWO)
@pytest.mark.parametrize("how", ["early", "leave"])
def test_a_rank_that_ends_early_is_named(way, how, tmp_path):
    with started(job(way, FAULTS, how), tmp_path) as running:
        code, _, errors = running.end()
    assert errors == "distconv: rank 1 of 2 ended early (exit code 0) while others waited for it\n"
    assert code == 1


@pytest.mark.parametrize("way", TWO)
@pytest.mark.parametrize("options", [(), ("--all",)], ids=["one", "all"])
def test_exit_codes_are_the_scripts(way, options, tmp_path):
    with started(job(way, FAULTS, "exit", *options), tmp_path) as running:
        code, _, errors = running.end()
    line = "distconv: rank 1 of 2 ended with exit code 7 while others were still running\n"
    assert (code, errors) == (7, "" if options else line)


# Signals from outside.


@pytest.mark.parametrize("way", TWO)
def test_sigterm_ends_a_script_without_a_handler(way, tmp_path):
    with started(job(way, FAULTS, "stay", "--child"), tmp_path) as running:
        running.await_line("started")
        running.process.terminate()
        code, _, errors = running.end()
    assert errors == "distconv: ended by SIGTERM\n"
    assert code == 128 + signal.SIGTERM


def test_a_handler_runs_after_the_same_step_on_every_rank(tmp_path):
    with started(job("alone", "--print-all-ranks", HANDLES, "flag"), tmp_path) as running:
        running.await_line("[0] started")
        running.process.terminate()
        code, printed, errors = running.end()
    assert (code, errors) == (5, "distconv: ended by SIGTERM\n")
    steps = sorted(printed.splitlines())
    assert [line[:9] for line in steps] == ["[0] after", "[1] after"]
    assert steps[0][9:] == steps[1][9:] and int(steps[0][9:]) >= 20


@pytest.mark.parametrize("to", ["launcher", "all"])
def test_an_interrupt_raises_after_the_same_step_on_every_rank(to, tmp_path):
    """Whether it is sent to the launcher, or, as a terminal does, to every process of the job."""
    with started(job("alone", "--print-all-ranks", HANDLES, "none", fresh=True), tmp_path) as running:
        running.await_line("[0] started")
        if to == "all":
            os.killpg(running.process.pid, signal.SIGINT)
        else:
            running.process.send_signal(signal.SIGINT)
        code, printed, errors = running.end()
    assert (code, errors) == (5, "distconv: ended by SIGINT\n")
    *steps, first, second = sorted(printed.splitlines())
    assert [first, second] == ["[1] after" + steps[0][9:], "[1] interrupted"]
    assert steps == [steps[0], "[0] interrupted"]


def test_an_interrupt_that_the_launcher_passes_on_late_does_not_end_the_end_of_a_script():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    store = dist.HashStore()
    store.set(f"distconv/signal/{signal.SIGINT.value}/1/1", "0")  # the other rank's, before its first step
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))])
    try:
        with pytest.raises(KeyboardInterrupt), common_handlers(store, rank=0, size=2):
            signal.raise_signal(signal.SIGINT)
            while True:
                optimizer.step()
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pytest.fail("the second one has interrupted, too")
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_interrupt_ends_a_script_that_does_not_catch_it(tmp_path):
    with started(job("alone", FAULTS, "stay", fresh=True), tmp_path) as running:
        running.await_line("started")
        os.killpg(running.process.pid, signal.SIGINT)
        code, _, errors = running.end()
    assert (code, errors) == (128 + signal.SIGINT, "distconv: ended by SIGINT\n")


def test_a_terminal_stays_one_and_hears_an_interrupt(tmp_path):
    script = tmp_path / "asks.py"
    script.write_text(
        "import sys, time\n"
        "print('terminal', sys.stdin.isatty(), sys.stdout.isatty(), sys.stderr.isatty(), flush=True)\n"
        "time.sleep(600)\n"
    )
    pid, terminal = pty.fork()
    if not pid:
        hear_interrupts()
        os.execve(sys.executable, job("alone", str(script), fresh=True), ENVIRONMENT)
    shown = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while some := os.read(terminal, 1000):
            shown += some
            if shown.endswith(b"True\r\n"):
                os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGINT
    assert shown == b"terminal True True True\r\n^Cdistconv: ended by SIGINT\r\n"
