from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.forked_python import run_python

pytest.importorskip("nilearn", reason="nilearn, which carries the MNI152 template, is not installed")

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "demo"
TINY = {
    "brain_slices.py": ["--steps", "2", "--size", "16", "--batch", "2", "--width", "4", "--kernel", "5"],
    "brain_volume.py": ["--steps", "2", "--size", "8x12x8", "--width", "4", "--levels", "2"],
}


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python(BENCHMARKS / script, *arguments, timeout=240)


def record(script: str, path: Path, *arguments: str) -> dict:
    done = run(script, *TINY[script], "--json", str(path), *arguments)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module", params=TINY)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict, Path]:
    folder = tmp_path_factory.mktemp("brain")
    weights = ["--save", str(folder / "weights.pt")] if request.param == "brain_volume.py" else []
    return request.param, record(request.param, folder / "record.json", *weights), folder


def test_the_record(trained: tuple[str, dict, Path]) -> None:
    _, found, _ = trained
    assert len(found["losses"]) == len(found["seconds"]) == 2
    assert all(0 < loss < 5 for loss in found["losses"])
    assert found["median_seconds"] > 0
    assert found["dice"].keys() == {"grey matter", "white matter"}
    assert all(0.3 < value < 1 for value in found["dice_of_thresholds"].values())


def test_one_seed_gives_the_same_numbers(trained: tuple[str, dict, Path], tmp_path: Path) -> None:
    script, found, _ = trained
    again = record(script, tmp_path / "again.json")
    assert again["losses"] == pytest.approx(found["losses"], rel=1e-6)


@pytest.mark.parametrize("trained", ["brain_volume.py"], indirect=True)
def test_another_seed_gives_other_numbers(trained: tuple[str, dict, Path], tmp_path: Path) -> None:
    script, found, _ = trained
    assert record(script, tmp_path / "other.json", "--seed", "1")["losses"] != pytest.approx(found["losses"], rel=1e-3)


@pytest.mark.parametrize("trained", ["brain_volume.py"], indirect=True)
def test_peak_memory_grows_with_the_volume(trained: tuple[str, dict, Path], tmp_path: Path) -> None:
    small = trained[1]["peak_tensor_bytes"]
    large = record("brain_volume.py", tmp_path / "large.json", "--size", "16x24x16")["peak_tensor_bytes"]
    # The input and the first two outputs, 4 and 8 channels, are alive together, in float32.
    assert small > 4 * 8 * 12 * 8 * (1 + 4 + 8)
    assert 6 * small < large < 9 * small


@pytest.mark.parametrize("trained", ["brain_volume.py"], indirect=True)
def test_a_picture_from_saved_weights(trained: tuple[str, dict, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    _, found, folder = trained
    picture = tmp_path / "picture.png"
    arguments = ["--load", str(folder / "weights.pt"), "--steps", "0", "--picture", str(picture)]
    loaded = record("brain_volume.py", tmp_path / "loaded.json", *arguments)
    assert loaded["dice"] == found["dice"]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("brain_slices.py", ["--kernel", "30"], "--kernel 30: not odd"),
        ("brain_slices.py", ["--batch", "0"], "--batch 0: not a positive number"),
        ("brain_volume.py", ["--size", "10x12x8"], "--size 10x12x8: not multiples of 4"),
        ("brain_volume.py", ["--size", "10x12"], "is not depth x height x width"),
        ("brain_volume.py", ["--width", "6"], "--width 6: not a multiple of 4"),
        ("brain_volume.py", ["--load", "nowhere.pt"], "--load nowhere.pt: no such file"),
    ],
)
def test_bad_arguments(script: str, arguments: list[str], message: str) -> None:
    done = run(script, *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


class TestTemplate:
    @pytest.fixture(scope="class")
    @staticmethod
    def brain():
        sys.path.insert(0, str(BENCHMARKS))
        try:
            import brain
        finally:
            sys.path.remove(str(BENCHMARKS))
        return brain

    def test_probabilities(self, brain) -> None:
        t1, probabilities = brain.template()
        assert t1.shape == brain.BOX and probabilities.shape == (3, *brain.BOX)
        assert t1.min() >= 0 and t1.max() == 1
        torch.testing.assert_close(probabilities.sum(0), torch.ones(brain.BOX))
        # White matter is brighter than grey matter in T1, and the head has more grey than white matter.
        grey, white = (t1[probabilities.argmax(0) == number] for number in (1, 2))
        assert white.mean() > grey.mean() > 0.5
        assert 500_000 < white.numel() < grey.numel() < 1_500_000

    def test_dice(self, brain) -> None:
        overlap = brain.Overlap()
        predicted, truth = torch.tensor([[1, 1, 2, 0]]), torch.tensor([[1, 2, 2, 1]])
        overlap.add(predicted, truth, torch.tensor(True))
        assert overlap.dice() == {"grey matter": 0.5, "white matter": pytest.approx(2 / 3)}

    @pytest.mark.parametrize("slices", [160, 80, 64, 40])
    def test_a_quarter_is_held_out_in_blocks(self, brain, slices: int) -> None:
        out = brain.held_out(slices)
        assert out.float().mean() == 0.25
        assert (out[1:] & ~out[:-1]).sum() == 5
