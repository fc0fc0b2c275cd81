"""What is installed works without the checkout: from a wheel, and from an editable install."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import distconv.__main__
import mucudnn.__main__
from mucudnn.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
NEIGHBOURS = Path(__file__).with_name("neighbours")
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "mucudnn", "distconv", "optimizer", "benchmarks", "tests")
BLOCK = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    """What a command prints, without the checkout on the path."""
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHONPATH", "DISTCONV", "MUCUDNN", "PMI"))}
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(
        command, cwd=cwd, env=kept | own, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def pip(*arguments: str, cwd: Path) -> None:
    run(sys.executable, "-m", "pip", *arguments, "--quiet", "--no-deps", "--no-index", cwd=cwd)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout to build from: building leaves folders behind."""
    copy = tmp_path_factory.mktemp("source")
    for name in NEEDED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, copy)
    return copy


def environment(folder: Path) -> Path:
    """A new environment that sees torch and all else that is installed here, but not what .pth files add; its bin."""
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / "installed_here.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return folder / "bin"


def install(bin: Path, *what: str, cwd: Path) -> None:
    # --ignore-installed: what is installed here, of the same name, is not to be touched.
    python = str(bin / "python")
    run(sys.executable, "-m", "pip", "--python", python, *_INSTALL, *what, cwd=cwd)


_INSTALL = ("install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed")


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("wheel")
    pip("wheel", ".", "--no-build-isolation", "--wheel-dir", str(built), cwd=source)
    (found,) = built.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    bin = environment(tmp_path_factory.mktemp("from-wheel"))
    install(bin, str(wheel), cwd=wheel.parent)
    return bin


def test_a_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = {Path(name) for name in zipfile.ZipFile(wheel).namelist()}
    tops = {name.parts[0] for name in names if not name.parts[0].endswith(".dist-info")}
    assert tops == {"mucudnn", "distconv"}
    sources = {
        path.relative_to(ROOT)
        for package in ("mucudnn", "distconv", "mucudnn/optimizer")
        for path in (ROOT / package).rglob("*.py")
    }
    assert sources == {name for name in names if name.suffix == ".py"}
    assert {Path("mucudnn/py.typed"), Path("distconv/py.typed")} <= names


def results(printed: str) -> list[str]:
    """What the script tells after its sys.path, which is another where another python runs it."""
    return printed.splitlines()[1:]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the script tells without the packages."""
    return results(run(sys.executable, str(NEIGHBOURS / "train.py"), cwd=tmp_path_factory.mktemp("plain")))


def test_commands_of_an_installed_wheel(installed: Path, plain: list[str], tmp_path: Path) -> None:
    """On one database: commands find what `bench` and `run` leave."""
    where = {"MUCUDNN_DATABASE": str(tmp_path / "times.sqlite")}

    def mucudnn(*arguments: str) -> str:
        return run(str(installed / "mucudnn"), *arguments, cwd=tmp_path, **where)

    small = (f"{ROOT}/tests/mucudnn/scripts/network.py:small", "--batch", "2", "--input", "3,21,21")
    layers = json.loads(mucudnn("bench", *small, "--policy", "undivided", "--json"))
    assert {layer["direction"] for layer in layers} == {"forward", "backward_data", "backward_filter"}
    assert results(mucudnn("run", "--report", "run.json", str(NEIGHBOURS / "train.py"))) == plain
    assert "forward" in mucudnn("report", "run.json")
    assert json.loads(mucudnn("doctor", "--json"))["shim"] == "works"


def test_distconv_of_an_installed_wheel(installed: Path, plain: list[str], tmp_path: Path) -> None:
    many = run(
        str(installed / "distconv"), "run", "--partition", "height=2", str(NEIGHBOURS / "train.py"), cwd=tmp_path
    )
    assert results(many) == plain


def test_an_editable_install_takes_no_other_name(source: Path, tmp_path: Path) -> None:
    bin = environment(tmp_path / "environment")
    install(bin, "--editable", str(source), cwd=tmp_path)
    program = """
import importlib.util, mucudnn.optimizer, distconv
assert mucudnn.__version__ == distconv.__version__
print(mucudnn.__file__, distconv.__file__, mucudnn.optimizer.__file__)
print([importlib.util.find_spec(name) for name in ("optimizer", "tests", "benchmarks", "networks")])
"""
    files, others = run(str(bin / "python"), "-c", program, cwd=tmp_path).splitlines()
    assert all(file.startswith(str(source)) for file in files.split())
    assert others == "[None, None, None, None]"


def test_imports_without_what_is_used_later(tmp_path: Path) -> None:
    absent = ("rich", "tqdm", "platformdirs", "matplotlib", "mpi4py")
    program = BLOCK.format(absent=absent) + (
        "import mucudnn, distconv\n"
        "from mucudnn.__main__ import main\n"
        "import os\n"
        "from mucudnn.settings import Settings\n"
        "for folder in (os.path.abspath('xdg'), 'relative'):\n"
        "    os.environ['XDG_CACHE_HOME'] = folder\n"
        "    print(Settings.from_environment().database)\n"
        "main(['run', 'script.py'])\n"
    )
    (tmp_path / "script.py").write_text("import torch\nprint(torch.ones(2).sum().item())\n")
    told = run(sys.executable, "-c", program, cwd=tmp_path, HOME=str(tmp_path), PYTHONPATH=str(ROOT))
    places = [str(tmp_path / folder / "mucudnn" / "times.sqlite") for folder in ("xdg", ".cache")]
    assert told.splitlines() == [*places, "2.0"]


def test_what_a_release_uploads(wheel: Path, source: Path, tmp_path: Path) -> None:
    """The sdist has what a wheel is built from, and the index can show the description of both."""
    build = "import setuptools.build_meta, sys; setuptools.build_meta.build_sdist(sys.argv[1])"
    run(sys.executable, "-c", build, str(tmp_path), cwd=source)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "distconv/py.typed", "mucudnn/py.typed"} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "optimizer").glob("*.py")} <= names
    told = run(sys.executable, "-m", "twine", "check", "--strict", str(wheel), str(sdist), cwd=tmp_path)
    assert told.count("PASSED") == 2


def test_the_versions_agree(capsys: pytest.CaptureFixture[str]) -> None:
    for package, main in (("mucudnn", mucudnn.__main__.main), ("distconv", distconv.__main__.main)):
        with pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as ended:
            patched.setattr(sys, "argv", [package, "--version"])
            main()
        assert (ended.value.code, capsys.readouterr().out) == (0, f"{package} {VERSION}\n")
    assert f"\nversion: {VERSION}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text()
