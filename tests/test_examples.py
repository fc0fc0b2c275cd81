"""The examples run, and print the same in one process and on ranks; each is run small."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from distconv.settings.partition import read_parts
from distconv.turns.turning import script_in_turn
from tests.forked_python import forked_python, run_python

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
SMALL = {
    "cifar_resnet": ("--steps", "2", "--batch", "4", "--width", "4"),
    "unet3d_amp": ("--steps", "2", "--size", "8", "--width", "2"),
    "vae_decode": ("--size", "64", "--width", "8"),
    "hdf5_volumes": ("volumes.h5", "--epochs", "1"),
    "cosmoflow": ("train", "universes", "--epochs", "1", "--width", "2", "--dropout", "0"),
}
ON_RANKS = """
import runpy, sys
for name, arguments in {small!r}.items():
    path = f"{folder}/{{name}}.py"
    print(name, *runpy.run_path(path)["main"](arguments))
"""


def loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_example_is_described() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")}
    assert set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text())) == files
    assert {f"{name}.py" for name in SMALL} | {"large_kernels.ipynb"} == files


def test_ranks_give_what_one_process_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All scripts in one job, as starting ranks takes seconds."""
    monkeypatch.chdir(tmp_path)
    loaded("hdf5_volumes").main(["volumes.h5", "--write", "--volumes", "4", "--size", "16"])
    loaded("cosmoflow").main(["write", "universes", "--size", "16", "--samples", "3"])
    alone = {name: loaded(name).main(list(arguments)) for name, arguments in SMALL.items()}
    for name in "cifar_resnet", "unet3d_amp":
        assert len(set(alone[name])) > 1, "it learns"
    script = tmp_path / "all.py"
    script.write_text(ON_RANKS.format(small=SMALL, folder=EXAMPLES))
    kept = {n: v for n, v in os.environ.items() if not n.startswith(("PMI", "OMPI", "DISTCONV", "MUCUDNN"))}
    done = subprocess.run(
        [forked_python(), "-m", "distconv", "run", "--shard-data", "--partition", "height=2", str(script)],
        env=kept
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "DISTCONV_SLOW_AFTER": "never"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.split()[0] in SMALL]
    on_ranks = {name: [float(number) for number in numbers] for name, *numbers in lines}
    assert on_ranks.keys() == alone.keys()
    for name, numbers in alone.items():
        within = 0.02 if name == "unet3d_amp" else 1e-4  # bfloat16 rounds to three digits
        assert on_ranks[name] == pytest.approx(numbers, rel=within), name


def test_parts_in_turn_give_what_one_process_gives() -> None:
    decode = loaded("vae_decode").main
    with script_in_turn((read_parts("height=4"), 1 << 20)):
        numbers = decode(list(SMALL["vae_decode"]))
    assert numbers == pytest.approx(decode(list(SMALL["vae_decode"])), rel=1e-4)


def test_a_script_in_turn_has_the_rules() -> None:
    command = (EXAMPLES / "vae_decode.py", *SMALL["vae_decode"])
    alone = run_python(*command).stdout
    in_turn = run_python("-m", "distconv", "run", "--parts", "height=4", *command).stdout
    assert in_turn.splitlines()[0] == alone.splitlines()[0]


def test_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cells in turn, as a kernel would run them."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    cells = json.loads((EXAMPLES / "large_kernels.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}
    for cell in cells:
        assert not cell.get("outputs"), "figures of one machine are not kept"
        if cell["cell_type"] == "code":
            small = "".join(cell["source"]).replace(
                "SAMPLES, SIZE, CALLS = 16, 64, 30", "SAMPLES, SIZE, CALLS = 2, 16, 4"
            )
            exec(small, names)
    assert (names["SAMPLES"], len(names["times"])) == (2, 4)
    torch.testing.assert_close(names["found"], names["expected"], rtol=1e-4, atol=1e-4)
    assert names["figure"].axes
