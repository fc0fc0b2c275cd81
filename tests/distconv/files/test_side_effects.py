"""What a script leaves in its folder on many ranks, against what plain python leaves there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import ENVIRONMENT, SCRIPTS, WAYS, command

from distconv.files.job_folder import make_folder

SIDE_EFFECTS = str(SCRIPTS / "side_effects.py")
CHECKPOINTS = str(SCRIPTS / "checkpoints.py")


def fill(folder: Path) -> Path:
    (folder / "old_folder" / "inner").mkdir(parents=True)
    (folder / "cache" / "deep").mkdir(parents=True)
    (folder / "old.txt").write_text("old\n")
    (folder / "settings.json").write_text('{"runs": 1}')
    (folder / "old_folder" / "kept.txt").write_text("kept")
    (folder / "cache" / "deep" / "entry").write_text("x")
    (folder / "remove_me.txt").write_text("x")
    return folder


def run(arguments: list[str], folder: Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    temporary.mkdir(exist_ok=True)
    environment = {**ENVIRONMENT, "TMPDIR": str(temporary)}
    return subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=200)


def contents(folder: Path) -> dict[str, object]:
    """Every path beneath, with what plain python reads there."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_dir():
            found[name] = None
        else:
            found[name] = path.read_bytes() if path.suffix != ".pt" else torch.load(path, weights_only=True)
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> tuple[str, dict[str, object]]:
    folder = fill(tmp_path_factory.mktemp("plain"))
    done = run([sys.executable, SIDE_EFFECTS], folder, tmp_path_factory.mktemp("tmp"))
    assert done.returncode == 0, done.stderr
    return done.stdout, contents(folder)


@pytest.mark.parametrize("way", WAYS)
def test_a_folder_holds_what_one_process_leaves(way, plain, tmp_path):
    folder = fill(tmp_path / "folder")
    done = run(command(way, 2, "--partition", "height=2", "--print-all-ranks", SIDE_EFFECTS), folder, tmp_path / "tmp")
    assert done.returncode == 0, done.stderr
    printed, expected = plain
    # Every rank reads back the same.
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {printed.strip()}" for rank in (0, 1)]
    left = contents(folder)
    assert left.keys() == expected.keys()
    for name, content in expected.items():
        if isinstance(content, dict):
            torch.testing.assert_close(left[name], content, rtol=1e-9, atol=1e-12)
        else:
            assert left[name] == content, name
    assert list((tmp_path / "tmp").glob("distconv-*")) == []  # nothing private is left


def test_a_distributed_checkpoint_is_written_by_all_ranks_and_a_failure_leaves_nothing_private(tmp_path):
    folder = fill(tmp_path / "folder")
    done = run(command("alone", 2, "--partition", "channel=2", CHECKPOINTS), folder, tmp_path / "tmp")
    assert done.returncode == 1 and "RuntimeError: after the checkpoint" in done.stderr, done.stderr
    assert sorted(path.name for path in (folder / "sharded").iterdir()) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
    assert (folder / "note.txt").read_text() == "first True"
    assert list((tmp_path / "tmp").glob("distconv-*")) == []


def test_folders_that_killed_jobs_left_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    running = Path(make_folder())
    ended = running.with_name(running.name.replace(f"-{os.getpid()}-", "-99999999-"))
    ended.mkdir()
    another = Path(make_folder())
    assert running.is_dir() and another.is_dir() and not ended.exists()
