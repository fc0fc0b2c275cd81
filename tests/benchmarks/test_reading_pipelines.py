"""The pipelines that read volumes from files: under `distconv run` the losses are those of one process."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from examples import cosmoflow
from tests.forked_python import run_python

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(script: str, *arguments: str, partition: str = "", options: tuple[str, ...] = ()) -> str:
    ranks = ["-m", "distconv", "run", "--shard-data", "--partition", partition, *options] if partition else []
    done = run_python(*ranks, ROOT / script, *arguments, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_cosmoflow_with_a_checkpoint_and_a_store(tmp_path):
    """Volumes with channels last, normalised by their own mean."""
    folder = tmp_path / "universes"
    cosmoflow.write(folder, 16, 5, 0)
    train = ["train", str(folder), "--width", "4", "--dropout", "0", "--rate", "0.01"]
    alone = cosmoflow.train(cosmoflow.arguments(train))
    written, checkpoint = tmp_path / "ranks.json", tmp_path / "checkpoint.pt"
    told = run(
        "examples/cosmoflow.py", *train, "--json", str(written), "--checkpoint", str(checkpoint),
        partition="depth=2", options=("--store", "memory=1"),
    )  # fmt: skip
    ranks = json.loads(written.read_text())
    assert "needs the whole" not in told
    assert ranks["losses"] == pytest.approx(alone["losses"], rel=1e-4) and len(set(alone["losses"])) == 4
    assert ranks["validation"] == pytest.approx(alone["validation"], rel=1e-4)
    goes_on = cosmoflow.train(cosmoflow.arguments([*train, "--checkpoint", str(checkpoint)]))
    assert goes_on["losses"] == ranks["losses"]  # one process reads it; nothing was left to train


def test_the_brain_read_from_zarr(tmp_path):
    pytest.importorskip("zarr", reason="zarr is not installed")
    pytest.importorskip("nilearn", reason="nilearn, which carries the MNI152 template, is not installed")
    tiny = ["--size", "8x12x8", "--width", "4", "--levels", "2", "--dtype", "float64"]
    data = str(tmp_path / "volumes.zarr")
    run("benchmarks/demo/brain_volume.py", *tiny, "--write", data)
    train = [*tiny, "--steps", "3", "--data", data]
    run("benchmarks/demo/brain_volume.py", *train, "--json", str(tmp_path / "alone.json"))
    run("benchmarks/demo/brain_volume.py", *train, "--json", str(tmp_path / "ranks.json"), partition="depth=2")
    one, ranks = (json.loads((tmp_path / name).read_text()) for name in ("alone.json", "ranks.json"))
    assert ranks["losses"] == pytest.approx(one["losses"], rel=1e-5)
