"""A picture decoded whole, in tiles, and in parts in turn: side by side, with the memory and the seconds of each.

    python benchmarks/turns/picture.py                          # 1024x1024, a minute
    python benchmarks/turns/picture.py --size 512 --parts height=16      # 4096x4096

The decoder is the image decoder of diffusers (AutoencoderKL, narrow, with random weights), which `call.py`, beside this
file, calls in a process of its own each time. Its tiles overlap, and are blended, as diffusers' enable_tiling does it.

It needs the extras `models` and `plot`.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT.parents[1]))

import torch

from benchmarks.table import Table, save, show
from benchmarks.turns.turns import SHARE, call, needed

WORK = "AutoencoderKL"
WAYS = ("whole", "tiled", "in turn")
FLOOR = 1e-8
"""Smaller differences are drawn like this one."""

ABOUT = """\
The image decoder of diffusers (narrow, with random weights) decodes a latent of {size}x{size} whole, in overlapping
tiles (diffusers' enable_tiling), and in parts in turn, {parts} within {limit:.0f} MiB: `python
benchmarks/turns/picture.py --size {size} --parts {parts}`. Memory is the weights and by how much the process grew at
most; seconds are processor time of a second call. The difference from the whole picture is relative to its largest
value. With random weights a decoder makes patterns of no meaning, but of the same extent as a trained one's.
"""


def decoded(size: int, parts: str) -> dict[str, dict[str, Any]]:
    """Each way's figures, and its picture (3, height, width)."""
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            file = Path(folder, "picture")
            options: tuple[str, ...] = ("--tiled",) if way == "tiled" else ()
            if way == "in turn":
                limit = int(SHARE * needed(found["whole"]))
                options = ("--parts", parts, "--memory", str(limit))
            found[way] = call(WORK, size, "--save", str(file), *options)
            found[way]["picture"] = torch.load(file, weights_only=True)["result"][0].float()
    return found


def difference(found: dict[str, dict[str, Any]], way: str) -> torch.Tensor:
    """From the whole picture, by pixel, relative to its largest value."""
    whole = found["whole"]["picture"]
    return (found[way]["picture"] - whole).abs().amax(0) / whole.abs().max()


def draw(found: dict[str, dict[str, Any]], path: Path) -> None:
    """Two rows: the middle of each picture, and where it differs from the whole one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.colors import LogNorm

    whole = found["whole"]["picture"]
    low, high = (float(whole[:, ::8, ::8].flatten().quantile(q)) for q in (0.02, 0.98))
    side = min(whole.shape[-1] // 2, 256)
    top, left = (extent // 4 - side // 2 for extent in whole.shape[1:])
    figure, axes = pyplot.subplots(2, 3, figsize=(10, 7), layout="constrained")
    image = None
    for place, way in enumerate(WAYS):
        crop = found[way]["picture"][:, top : top + side, left : left + side]
        axes[0, place].imshow(((crop - low) / (high - low)).clamp(0, 1).permute(1, 2, 0).numpy())
        memory, seconds = needed(found[way]) / 2**20, found[way]["seconds"]
        axes[0, place].set_title(f"{way}: {memory:.0f} MiB, {seconds:.1f} s")
        if way != "whole":
            shown = difference(found, way)[None, None]
            shown = torch.nn.functional.adaptive_max_pool2d(shown, 512)[0, 0].clamp(min=FLOOR)
            image = axes[1, place].imshow(shown.numpy(), norm=LogNorm(FLOOR, 1), cmap="magma")
            axes[1, place].set_title(f"difference of at most {float(difference(found, way).max()):.0e}")
    for each in axes.flat:
        each.set_axis_off()
    figure.colorbar(image, ax=axes[1, 1:], location="right", label="difference from whole, relative")
    figure.savefig(path, dpi=80)


def table(found: dict[str, dict[str, Any]]) -> Table:
    """A row for each way."""
    rows = [
        (
            way,
            f"{needed(found[way]) / 2**20:.0f}",
            f"{needed(found[way]) / needed(found['whole']):.2f}",
            f"{found[way]['seconds']:.1f}",
            f"{float(difference(found, way).max()):.0e}",
            f"{float(difference(found, way).mean()):.0e}",
        )
        for way in WAYS
    ]
    shape = "x".join(str(extent) for extent in found["whole"]["picture"].shape[1:])
    headings = ("way", "memory, MiB", "part of whole", "seconds", "largest difference", "mean difference")
    return Table(f"A picture of {shape}", headings, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=128, help="height and width of the latent (default %(default)s)")
    parser.add_argument("--parts", default="height=8", metavar="AXIS=PARTS,...", help="(default %(default)s)")
    parser.add_argument("--picture", type=Path, default=Path("picture.png"), help="(default %(default)s)")
    parser.add_argument("--save", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args()
    found = decoded(options.size, options.parts)
    draw(found, options.picture)
    shown = [table(found)]
    show(shown)
    print(f"See {options.picture}.")
    if options.save:
        figures = {way: {k: v for k, v in each.items() if k != "picture"} for way, each in found.items()}
        limit = SHARE * needed(found["whole"]) / 2**20
        about = ABOUT.format(size=options.size, parts=options.parts, limit=limit)
        save("turns-picture-cpu", "A picture whole, in tiles and in turn", about, figures, shown)


if __name__ == "__main__":
    main()
