"""Libraries, on a rank other than the first: they read back what they wrote, and the disk holds none of it."""

from __future__ import annotations

import glob
import gzip
import multiprocessing
import os
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

import distconv
from distconv.files.private import files_of_rank
from distconv.job.ending import as_python_prints, refusal_of
from distconv.tensors.refusal import UnsupportedOperation


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of a rank's script, which is as it was when the test is over."""
    work, job = tmp_path / "work", tmp_path / "job"
    work.mkdir()
    job.mkdir()
    (work / "old.txt").write_text("old")
    monkeypatch.chdir(work)
    with files_of_rank(str(job), 1):
        yield work
    assert [path.name for path in work.iterdir()] == ["old.txt"] and (work / "old.txt").read_text() == "old"
    assert not job.exists()


def test_archives_and_compressed_files(folder):
    with zipfile.ZipFile("a.zip", "w") as archive:
        archive.write("old.txt")
    with tarfile.open("a.tar.gz", "w:gz") as archive:
        archive.add("old.txt")
    with gzip.open("a.gz", "wt") as file:
        file.write("x")
    shutil.unpack_archive("a.zip", "from_zip")
    shutil.unpack_archive("a.tar.gz", "from_tar")
    assert Path("from_zip/old.txt").read_text() == Path("from_tar/old.txt").read_text() == "old"
    assert gzip.open("a.gz", "rt").read() == "x"  # noqa: SIM115


@pytest.mark.filterwarnings("ignore:.torch.jit")
def test_torch_and_numpy(folder):
    torch.save({"a": torch.ones(3)}, "a.pt")
    for mapped in (False, True):
        assert torch.load("a.pt", mmap=mapped)["a"].sum() == 3
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), "a.jit")
    assert torch.jit.load("a.jit")(torch.tensor(-1.0)) == 0
    torch.jit.trace(torch.nn.ReLU(), torch.ones(1)).save(Path("b.jit"))
    torch.jit.trace(torch.relu, torch.ones(1)).save("c.jit")
    assert torch.jit.load("b.jit")(torch.tensor(-1.0)) == torch.jit.load("c.jit")(torch.tensor(-1.0)) == 0
    torch.export.save(torch.export.export(torch.nn.ReLU(), (torch.ones(1),)), "d.pt2")
    assert torch.export.load("d.pt2").module()(-torch.ones(1)) == 0
    with torch.package.PackageExporter("e.zip") as package:
        package.save_pickle("model", "tensor.pkl", torch.ones(3))
    assert torch.package.PackageImporter("e.zip").load_pickle("model", "tensor.pkl").sum() == 3
    stored = torch.from_file("raw", shared=True, size=4, dtype=torch.float32)
    stored.fill_(2)
    assert os.path.getsize("raw") == 16
    np.arange(3).tofile("b.bin")
    assert np.fromfile("b.bin", dtype="int64").tolist() == [0, 1, 2]
    mapped = np.memmap("c.map", dtype="int32", mode="w+", shape=(2,))
    mapped[:] = 5
    assert np.memmap("c.map", dtype="int32", mode="r+").tolist() == [5, 5]


def test_a_database(folder):
    for _ in range(2):
        connection = sqlite3.connect("a.sqlite")
        connection.execute("create table if not exists t (x)")
        connection.execute("insert into t values (1)")
        connection.commit()
        connection.close()
    connection = sqlite3.connect("a.sqlite")
    assert connection.execute("select count(*) from t").fetchone() == (2,)
    connection.close()
    assert Path("a.sqlite").stat().st_size and sqlite3.connect(":memory:").execute("select 1").fetchone() == (1,)


def test_pandas_and_pictures(folder):
    pandas = pytest.importorskip("pandas")
    image = pytest.importorskip("PIL.Image")
    pandas.DataFrame({"a": [1, 2]}).to_csv("a.csv")
    assert len(pandas.read_csv("a.csv")) == 2
    image.new("RGB", (2, 3)).save("a.png")
    assert image.open("a.png").size == (2, 3)


def test_hdf5_and_safetensors(folder):
    h5py, safetensors = pytest.importorskip("h5py"), pytest.importorskip("safetensors.torch")
    for mode, name in (("w", "x"), ("a", "y")):
        with h5py.File("a.h5", mode) as file:
            file[name] = np.arange(3)
    with h5py.File("a.h5") as file:
        assert set(file) == {"x", "y"}
    safetensors.save_file({"a": torch.ones(2)}, "a.safetensors")
    assert safetensors.load_file("a.safetensors")["a"].sum() == 2


def test_volumes_of_simpleitk(folder):
    simple = pytest.importorskip("SimpleITK")
    volume = np.arange(24, dtype=np.int16).reshape(2, 3, 4)
    simple.WriteImage(simple.GetImageFromArray(volume), "a.nii.gz")
    simple.ImageFileWriter().Execute(simple.GetImageFromArray(volume), "b.nii.gz", False, -1)
    simple.WriteImage(simple.GetImageFromArray(volume), ["0.mha", "1.mha"])
    for name in ("a.nii.gz", Path("b.nii.gz"), ("0.mha", "1.mha")):
        assert np.array_equal(simple.GetArrayFromImage(simple.ReadImage(name)), volume)
    assert sorted(os.listdir()) == ["0.mha", "1.mha", "a.nii.gz", "b.nii.gz", "old.txt"]


def test_an_array_in_memory_that_a_library_maps(folder):
    arrow = pytest.importorskip("pyarrow")
    Path("a.arrow").write_bytes(b"abc")
    with arrow.memory_map("a.arrow") as file:
        assert file.read() == b"abc"


def test_tensorboard(folder):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    with tensorboard.SummaryWriter("events") as writer:
        writer.add_scalar("loss", 1.0, 0)
    assert len(os.listdir("events")) == 1


def test_walks_globs_and_names(folder):
    os.makedirs("a/b")
    Path("a/b/c.txt").touch()
    os.symlink("a", "link")
    assert [(top, sorted(folders), files) for top, folders, files in os.walk(".")] == [
        (".", ["a", "link"], ["old.txt"]),
        ("./a", ["b"], []),
        ("./a/b", [], ["c.txt"]),
    ]
    assert glob.glob("**/*.txt", recursive=True) == ["old.txt", "a/b/c.txt", "link/b/c.txt"]
    assert sorted(map(str, Path().rglob("*.txt"))) == ["a/b/c.txt", "old.txt"]
    assert Path("link/b/c.txt").resolve() == folder / "a/b/c.txt"
    assert os.listdir(b"a") == [b"b"] and os.path.realpath(b"link") == os.fsencode(folder / "a")
    os.chdir("a/b")
    assert Path.cwd() == folder / "a/b" and Path("c.txt").exists() and os.path.abspath("c.txt") == f"{folder}/a/b/c.txt"
    with open("c.txt") as file:
        assert file.name == "c.txt"
    os.chdir(folder)
    descriptor = os.open("a", os.O_RDONLY)
    assert os.listdir(descriptor) == ["b"]
    os.unlink("b/c.txt", dir_fd=descriptor)
    os.close(descriptor)
    shutil.rmtree("a")
    os.unlink("link")
    assert os.listdir() == ["old.txt"]


def test_classes_that_keep_functions(tmp_path, monkeypatch):
    class Globber:  # as in Python 3.13's glob
        scandir = staticmethod(os.scandir)

    monkeypatch.setattr(glob, "_OurGlobber", Globber, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    with files_of_rank(str(tmp_path / "job"), 1):
        Path("mine").touch()
        with Globber.scandir(".") as entries:
            assert "mine" in {entry.name for entry in entries}
    assert Globber.scandir is os.scandir and not Path("mine").exists()


def test_temporary_files_are_this_ranks_own(folder):
    with tempfile.NamedTemporaryFile() as file:
        assert file.name.startswith(os.environ["TMPDIR"]) and Path(file.name).exists()
    with tempfile.TemporaryDirectory(dir=".") as name:
        Path(name, "x").touch()
        assert os.path.basename(name) in os.listdir()


def test_processes_that_are_spawned(folder):
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        pool.apply(shutil.copy, ("old.txt", "new.txt"))
    assert Path("new.txt").read_text() == "old"


def test_errors_are_those_of_python(folder):
    def error(path: str, mode: str) -> OSError | ValueError:
        with pytest.raises((OSError, ValueError)) as raised:
            open(path, mode)  # noqa: SIM115 (it fails)
        return raised.value

    missing = error("missing.txt", "r")
    assert str(missing) == "[Errno 2] No such file or directory: 'missing.txt'"
    assert "functions.py" not in as_python_prints(missing) and "open(path, mode)" in as_python_prints(missing)
    assert str(error("old.txt/x", "w")) == "[Errno 20] Not a directory: 'old.txt/x'"
    assert str(error("old.txt", "x")) == "[Errno 17] File exists: 'old.txt'"
    assert refusal_of(error("old.txt", "q")) is None


def test_a_refusal_names_its_place_once() -> None:
    made_up = os.path.join(os.path.dirname(distconv.__file__), "made_up.py")
    within = {}
    exec(compile("def fail(error): raise error", made_up, "exec"), within)
    here = f"{os.path.relpath(__file__)}:{sys._getframe().f_lineno + 3}"
    for text, told in ((f"refused; at {here}", f"refused; at {here}"), ("refused", f"{here}: refused")):
        with pytest.raises(UnsupportedOperation) as raised:
            within["fail"](UnsupportedOperation(text))
        assert refusal_of(raised.value) == told


def test_all_is_plain_again_afterwards(tmp_path):
    before = open, os.open, os.stat, torch.save, sqlite3.connect, list(sys.meta_path), shutil._use_fd_functions
    (tmp_path / "job").mkdir()
    with files_of_rank(str(tmp_path / "job"), 1):
        assert open is not before[0]
    assert before == (open, os.open, os.stat, torch.save, sqlite3.connect, sys.meta_path, shutil._use_fd_functions)


def test_a_rank_on_another_machine_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with files_of_rank(str(tmp_path / "not here"), 1):
        Path("x").write_text("mine")
        assert Path("x").read_text() == "mine"
    assert list(tmp_path.iterdir()) == []
