"""The folder of a job's private files: whose it is, how long it stays, and what others can tell a rank of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from distconv.files.job_folder import key_of, make_folder, remove_folder, remove_folders_of
from distconv.job import surroundings as module
from distconv.job.random_state import Entropy, as_text, set_generators, state_of_generators
from distconv.job.surroundings import surroundings

ANOTHER = os.geteuid() + 1
"""Another user."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has temporary files of its own, and random numbers go on afterwards as if it had not run."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("DISTCONV_FILES", raising=False)
    return tmp_path


def be_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda *_: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda *_: 1)


def test_a_rank_does_not_touch_a_folder_that_somebody_else_names_in_the_store(alone, monkeypatch):
    precious = alone / "precious"
    precious.mkdir(mode=0o700)
    (precious / "thesis").write_text("years")
    store = dist.HashStore()
    given = {"generators": as_text(state_of_generators()), "folder": str(precious), "entropy": "x" * 32, "check": ""}
    for name, value in given.items():
        store.set(f"distconv/start/{name}", value)
    be_rank(1, monkeypatch)
    with pytest.raises(RuntimeError, match="is not that of this job's private files"), surroundings(store):
        pass
    assert os.listdir(precious) == ["thesis"]


class Heard(dist.Store):
    """A store, and what a neighbour hears of it."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key: str) -> bytes:
        return self.values[key]

    def add(self, key: str, number: int) -> int:
        self.set(key, str(int(self.values.get(key, b"0")) + number))
        return int(self.values[key])


def test_who_hears_the_store_does_not_know_the_random_numbers_of_a_machines_ranks(monkeypatch):
    store, before = Heard(), state_of_generators()
    be_rank(0, monkeypatch)
    monkeypatch.setattr(module, "is_on_one_machine", lambda: True, raising=False)
    try:
        with surroundings(store, show_ranks=True):
            drawn = os.urandom(16)
    finally:
        set_generators(before)
    assert store.values
    assert all(Entropy(value).draw("system", 16) != drawn for value in store.values.values())


@pytest.mark.parametrize("secrets, agree", [(("", ""), True), (("s" * 16,) * 2, True), (("s" * 16, "t" * 16), False)])
def test_ranks_of_several_machines_draw_the_same_or_end(secrets, agree, alone, monkeypatch):
    store, keys = Heard(), []
    monkeypatch.setattr(module, "is_on_one_machine", lambda: False)
    for rank, secret in enumerate(secrets):
        be_rank(rank, monkeypatch)
        file = alone / f"secret of rank {rank}"
        if secret:
            file.touch(mode=0o600)
            file.write_text(secret)
            monkeypatch.setenv("DISTCONV_SECRET", str(file))
        if rank and not agree:
            with pytest.raises(RuntimeError, match="the same file of DISTCONV_SECRET"):
                module._first_ranks(store, None)
            return
        keys.append(module._first_ranks(store, None)[1])
        if not rank:  # the other machine does not see the folder
            remove_folder(store.values["distconv/start/folder"].decode())
    heard = module._key(b"", store.values["distconv/start/entropy"])
    assert keys[0] == keys[1] and (keys[0] != heard) == bool(secrets[0])


def linked(folder: Path) -> Path:
    link = folder.with_name(folder.name + "x")
    link.symlink_to(folder)
    return link


def opened(folder: Path) -> Path:
    folder.chmod(0o755)
    return folder


def readable(folder: Path) -> Path:
    (folder / "key").chmod(0o644)
    return folder


def replaced(folder: Path) -> Path:
    (folder / "key").rename(folder.parent / "key")
    (folder / "key").symlink_to(folder.parent / "key")
    return folder


OTHERS: dict[str, Callable[[Path], Path]] = {
    "a link": linked,
    "others may enter": opened,
    "others may read the key": readable,
    "the key is a link": replaced,
    "another name": lambda folder: folder.rename(folder.with_name("else")),
    "nothing": lambda folder: folder.with_name("distconv-nothing"),
    "within it": lambda folder: Path(f"{folder}/key"),
}


@pytest.mark.parametrize("change", OTHERS)
def test_what_is_no_folder_of_this_job_is_refused(change):
    folder = make_folder("job 1")
    assert len(key_of(folder, "job 1")) == 32
    path = OTHERS[change](Path(folder))
    with pytest.raises(RuntimeError, match="is not that of this job's private files"):
        key_of(str(path), "job 1")


def test_another_jobs_and_another_users_folder_are_refused(monkeypatch):
    folder = make_folder("job 1")
    with pytest.raises(RuntimeError, match="another job's"):
        key_of(folder, "job 2")
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    with pytest.raises(RuntimeError, match="another user's"):
        key_of(folder, "job 1")


def test_a_folder_stays_while_its_maker_lives_whatever_number_that_has_here(alone, monkeypatch):
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(os, "getpid", lambda: 99999999)  # as of a process in a container that is none here
        running = Path(make_folder())
    left = running.with_name(running.name + "left")
    left.mkdir()
    another = Path(make_folder())
    remove_folders_of(99999999)
    assert running.is_dir() and another.is_dir() and not left.exists()


def test_a_process_that_is_forked_off_does_not_keep_its_parents_folder(alone):
    folder, (read, write) = make_folder(), os.pipe()
    child = os.fork()
    if not child:
        os.read(read, 1)
        os._exit(0)
    try:
        remove_folder(folder)
        os.mkdir(folder)
        make_folder()
        assert not os.path.exists(folder)
    finally:
        os.write(write, b"x")
        os.waitpid(child, 0)


def test_what_somebody_else_has_put_among_the_temporary_files_stays(alone, monkeypatch):
    name = Path(make_folder()).name.rpartition("-")[0]
    target = alone / "target"
    target.mkdir()
    (alone / f"{name}-link").symlink_to(target)
    (alone / f"{name}-file").write_text("x")
    make_folder()
    assert target.is_dir() and (alone / f"{name}-link").is_symlink() and (alone / f"{name}-file").exists()
    (alone / f"{name}-others").mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: ANOTHER)
    make_folder()
    assert (alone / f"{name}-others").is_dir()
