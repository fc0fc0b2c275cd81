"""A picture or a video decoded whole, in tiles, and in parts in turn: side by side, with memory and seconds of each.

    python benchmarks/turns/picture.py                          # 1024x1024, a minute
    python benchmarks/turns/picture.py --size 512 --parts height=16      # 4096x4096, an hour
    python benchmarks/turns/picture.py --decoder AutoencoderKLWan --size 64      # a video of 512x512

The decoders are those of diffusers (narrow, with random weights). `plain.py`, beside this file, is an ordinary script
that decodes; it runs in a process of its own each time, for parts in turn under `distconv run --parts`. Its tiles
overlap, and are blended, as diffusers' enable_tiling does it.

It needs the extras `models` and `plot`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parents[1]))

import torch

from benchmarks.distributed.decode import DECODERS
from benchmarks.table import Table, save, show
from benchmarks.turns.turns import SHARE, surroundings

WAYS = ("whole", "tiled", "in turn")
FLOOR = 1e-8
"""Smaller differences are drawn like this one."""

ABOUT = """\
{decoder} of diffusers (narrow, with random weights) decodes a latent of {size}x{size} whole, in overlapping tiles
(diffusers' enable_tiling), and in parts in turn, {parts} within {limit:.0f} MiB: `python benchmarks/turns/picture.py
--decoder {decoder} --size {size} --parts {parts}`. An ordinary script does it, in one process on one core. Memory is
the most that the process had resident, with Python, torch and diffusers; seconds are processor time from start to end.
The difference from the whole result is relative to its largest value. With random weights a decoder makes patterns of
no meaning, but of the same extent as a trained one's.
"""


def run(command: list[str]) -> dict[str, Any]:
    """Memory in bytes and processor seconds of a process. CalledProcessError where it fails."""
    process = subprocess.Popen(command, env=surroundings())
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"memory": 1024 * used.ru_maxrss, "seconds": used.ru_utime + used.ru_stime}


def decoded(decoder: str, size: int, parts: str) -> dict[str, dict[str, Any]]:
    """Each way's figures, and its picture or frames (3, [frames,] height, width)."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            file = Path(folder, "result.pt")
            script = [str(ROOT / "plain.py"), decoder, str(file), "--size", str(size)]
            before: list[str] = []
            if way == "tiled":
                script.append("--tiled")
            if way == "in turn":
                limit = int(SHARE * found["whole"]["memory"])
                before = ["-m", "distconv", "run", "--parts", parts, "--memory", str(limit)]
            found[way] = run([sys.executable, *before, *script])
            found[way]["picture"] = torch.load(file, weights_only=True)[0].float()
            print(f"{way}: {found[way]['memory'] / 2**20:.0f} MiB, {found[way]['seconds']:.1f} s", flush=True)
    return found


def difference(found: dict[str, dict[str, Any]], way: str) -> torch.Tensor:
    """From the whole picture, by pixel, the most of all frames, relative to its largest value."""
    whole = found["whole"]["picture"]
    return (found[way]["picture"] - whole).abs().flatten(0, -3).amax(0) / whole.abs().max()


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Two rows: the middle of each picture, and where it differs from the whole one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    shown = {way: _middle_frame(found[way]["picture"]) for way in WAYS}
    whole = shown["whole"]
    low, high = (float(whole[:, ::8, ::8].flatten().quantile(q)) for q in (0.02, 0.98))
    side = min(whole.shape[-1] // 2, 256)
    top, left = (extent // 4 - side // 2 for extent in whole.shape[1:])
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 7), layout="constrained")
    image = None
    for place, way in enumerate(WAYS):
        crop = shown[way][:, top : top + side, left : left + side]
        axes[0, place].imshow(((crop - low) / (high - low)).clamp(0, 1).permute(1, 2, 0).numpy())
        memory, seconds = found[way]["memory"] / 2**20, found[way]["seconds"]
        axes[0, place].set_title(f"{way}: {memory:.0f} MiB, {seconds:.1f} s")
        if way != "whole":
            apart = torch.nn.functional.adaptive_max_pool2d(difference(found, way)[None], 512)[0].clamp(min=FLOOR)
            image = axes[1, place].imshow(apart.numpy(), norm=LogNorm(FLOOR, 1), cmap="magma")
            axes[1, place].set_title(f"difference of at most {float(difference(found, way).max()):.0e}")
    for each in axes.flat:
        each.set_axis_off()
    figure.colorbar(image, ax=axes[1, 1:], location="right", label="difference from whole, relative")
    figure.savefig(path, dpi=64)


def _middle_frame(result: torch.Tensor) -> torch.Tensor:
    """(3, height, width), of a picture or a video."""
    return result if result.dim() == 3 else result[:, result.shape[1] // 2]


def table(found: dict[str, dict[str, Any]]) -> Table:
    """A row for each way."""
    rows = [
        (
            way,
            f"{found[way]['memory'] / 2**20:.0f}",
            f"{found[way]['memory'] / found['whole']['memory']:.2f}",
            f"{found[way]['seconds']:.1f}",
            f"{float(difference(found, way).max()):.0e}",
            f"{float(difference(found, way).mean()):.0e}",
        )
        for way in WAYS
    ]
    shape = "x".join(map(str, found["whole"]["picture"].shape[1:]))
    headings = ("way", "memory, MiB", "part of whole", "seconds", "largest difference", "mean difference")
    return Table(f"A result of {shape}", headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoder", choices=DECODERS, default="AutoencoderKL", help="(default %(default)s)")
    parser.add_argument("--size", type=int, default=128, help="height and width of the latent (default %(default)s)")
    parser.add_argument("--parts", default="height=8", metavar="AXIS=PARTS,...", help="(default %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("picture.png"), help="(default %(default)s)")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args()
    found = decoded(options.decoder, options.size, options.parts)
    draw(found, options.picture)
    shown = [table(found)]
    show(shown)
    print(f"See {options.picture}.")
    if options.save:
        limit = SHARE * found["whole"]["memory"] / 2**20
        about = ABOUT.format(decoder=options.decoder, size=options.size, parts=options.parts, limit=limit)
        name = f"turns-{options.decoder.lower()}-cpu"
        save(name, f"{options.decoder}: whole, in tiles and in turn", about, shown)


if __name__ == "__main__":
    main()
