"""Going on from a checkpoint after a death, and the errors of files and numbers that scripts meet."""

from __future__ import annotations

import pytest
from jobs import ENVIRONMENT, SCRIPTS, command, launch, started

from tests.forked_python import forked_python, run_python

RESUMES, ERRORS = str(SCRIPTS / "resumes.py"), str(SCRIPTS / "errors.py")


def losses(printed: str) -> dict[int, float]:
    pairs = [line.split() for line in printed.splitlines() if line[:1].isdigit()]
    return {int(step): float(loss) for step, loss in pairs}


def test_torchrun_starts_anew_and_fewer_ranks_go_on(tmp_path):
    plain = run_python(RESUMES, "--steps", "6", "--checkpoint", tmp_path / "plain.pt", env=ENVIRONMENT)
    expected = losses(plain.stdout)
    assert len(expected) == 6, plain.stderr
    temporary, checkpoint = tmp_path / "temporary", str(tmp_path / "ours.pt")
    temporary.mkdir()
    torchrun = [forked_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    torchrun += ["--max-restarts", "2", "-m", "distconv", "run", "--show-ranks", "--partition", "sample=2,height=2"]
    torchrun += ["--shard-parameters"]
    with started([*torchrun, RESUMES, "--steps", "4", "--checkpoint", checkpoint, "--die"], temporary) as job:
        code, printed, errors = job.end()
    assert code == 0, errors
    assert "distconv: rank 1 of 4 was killed (signal 9)" in errors
    found = losses(printed)
    assert sorted(found) == [0, 1, 2, 3]
    files = [*(tmp_path / "ours.pt.model").iterdir()]
    assert len(files) == 5, files  # of the last save alone
    for ranks, partition, steps in [(2, "height=2", 5), (1, "sample=1", 6)]:
        done = launch(
            "alone", ranks, "--partition", partition, RESUMES, "--steps", str(steps), "--checkpoint", checkpoint
        )
        assert done.returncode == 0, done.stderr
        assert list(losses(done.stdout)) == [steps - 1]
        found |= losses(done.stdout)
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("how", "error"),
    [
        ("full", "OSError: [Errno 28] No space left on device"),
        ("read-only", "PermissionError: [Errno 13] Permission denied: '/sys/kernel/log.csv'"),
        ("unreadable", "UnpicklingError: "),
    ],
)
def test_an_error_of_a_file_is_shown_once_and_ends_every_rank(how, error, tmp_path):
    folder, temporary = tmp_path / "folder", tmp_path / "temporary"
    folder.mkdir(), temporary.mkdir()
    with started(command("alone", 2, "--partition", "height=2", ERRORS, how, str(folder)), temporary) as job:
        code, printed, errors = job.end()
    assert (code, printed) == (1, "")
    assert errors.count("Traceback") == 1 and errors.count(error) == 1
    assert not [line for line in errors.splitlines() if line.startswith("distconv: rank")]


def test_a_loss_that_is_nan_is_so_on_every_rank(tmp_path):
    arguments = ("--print-all-ranks", "--partition", "height=2", ERRORS, "nan", str(tmp_path))
    with started(command("alone", 2, *arguments), tmp_path) as job:
        code, printed, errors = job.end()
    assert code == 0, errors
    assert sorted(printed.splitlines()) == ["[0] nan"] * 3 + ["[1] nan"] * 3
