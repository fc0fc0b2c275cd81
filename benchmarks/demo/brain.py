"""The MNI152 template as training data: T1 images with grey and white matter.

The three volumes are the skull-stripped T1 average and the grey and white matter probabilities of the ICBM152 2009
template (Fonov et al., NeuroImage 54, 2011) at 1 mm, which nilearn carries in its package: nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = ("rest", "grey matter", "white matter")
BOX = (160, 192, 160)
"""Millimetres along depth (foot to head), height (back to front) and width that hold the whole brain."""


def stop(message: str) -> None:
    """Ends the program for bad input: one line, exit code 2."""
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    raise SystemExit(2)


def add_arguments(parser: argparse.ArgumentParser, noise: float) -> None:
    """What every training here takes; `noise` is the default of --noise."""
    parser.add_argument("--rate", type=float, default=1e-2, help="highest learning rate (default %(default)s)")
    parser.add_argument(
        "--noise", type=float, default=noise, help="standard deviation, T1 in [0, 1] (default %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise (default %(default)s)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32", help="(default %(default)s)")
    parser.add_argument("--device", default="cpu", help="such as cpu or cuda (default %(default)s)")
    parser.add_argument("--json", metavar="FILE", help='write all losses and seconds there ("-": print them)')
    parser.add_argument("--picture", metavar="FILE", help="draw a held-out slice, the truth and the prediction there")


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """Ends the program where one of the arguments is below 1."""
    for name in names:
        if getattr(options, name) < 1:
            stop(f"--{name} {getattr(options, name)}: not a positive number")


def template() -> tuple[Tensor, Tensor]:
    """T1 in [0, 1] (160, 192, 160) and probabilities (3, 160, 192, 160) of CLASSES; depth, height, width in mm."""
    try:
        from nilearn import datasets
    except ImportError:
        stop("needs nilearn, which carries the MNI152 template: pip install nilearn")
    loaders = (datasets.load_mni152_template, datasets.load_mni152_gm_template, datasets.load_mni152_wm_template)
    volumes = torch.stack([torch.from_numpy(loader(resolution=1).get_fdata()).float() for loader in loaders])
    volumes = volumes.permute(0, 3, 2, 1)
    brain = (volumes[0] > 0).nonzero()
    first, last = brain.amin(0).tolist(), brain.amax(0).tolist()
    for dim, (low, high, length) in enumerate(zip(first, last, BOX, strict=True), start=1):
        size = high - low + 1
        before = (length - size) // 2
        volumes = volumes.narrow(dim, low, size)
        edges = [0, 0] * (3 - dim) + [before, length - size - before]
        volumes = F.pad(volumes, edges)
    grey, white = volumes[1].clamp(0, 1), volumes[2].clamp(0, 1)
    rest = (1 - grey - white).clamp(min=0)
    return volumes[0].contiguous(), torch.stack([rest, grey, white])


def held_out(slices: int, millimetres: int = 8) -> Tensor:
    """Which of the axial slices of the box are kept from training (slices,): every fourth block of 8 mm.

    Whole blocks, because a slice between two that were trained on differs little from them.
    """
    position = torch.arange(slices) * BOX[0] // slices
    return position // millimetres % 4 == 2


def with_noise(images: Tensor, level: float, generator: torch.Generator) -> Tensor:
    """Adds normal noise of standard deviation `level`: the template is an average of 152 heads, a scan is not."""
    return images + level * torch.randn(images.shape, generator=generator)


def train(
    model: nn.Module, rate: float, steps: int, draw: Callable[[], tuple[Tensor, Tensor]]
) -> tuple[list[float], list[float]]:
    """Trains with AdamW on a one-cycle schedule; `draw` makes inputs and targets. (losses, seconds) of the steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps + 1)
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(1, steps + 1):
        inputs, targets = draw()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        schedule.step()
        print(f"step {step:3d}  loss {losses[-1]:.6f}  {seconds[-1]:.3f} s", flush=True)
    return losses, seconds


class Overlap:
    """Dice = 2 |A and B| / (|A| + |B|) of grey and of white matter, summed over batches.

    Only sums over whole tensors are taken, so predictions never have to be brought together.
    """

    def __init__(self) -> None:
        self.both = [0.0, 0.0]
        self.sizes = [0.0, 0.0]

    def add(self, predicted: Tensor, truth: Tensor, where: Tensor) -> None:
        """predicted, truth: class numbers (N, *spatial); where: booleans that broadcast to them."""
        for index in (0, 1):
            of_class, true = (predicted == index + 1) & where, (truth == index + 1) & where
            self.both[index] += (of_class & true).sum().item()
            self.sizes[index] += of_class.sum().item() + true.sum().item()

    def dice(self) -> dict[str, float]:
        return {
            name: 2 * both / size if size else float("nan")
            for name, both, size in zip(CLASSES[1:], self.both, self.sizes, strict=True)
        }


def threshold_dice(images: Tensor, truth: Tensor, trained: Tensor, tested: Tensor) -> dict[str, float]:
    """The baseline: Dice where `tested` of the two intensity thresholds that do best where `trained`.

    images and truth have one shape; trained and tested are booleans that broadcast to it.
    """

    def overlap(low: float, high: float, where: Tensor) -> Overlap:
        made = Overlap()
        made.add((images >= low).long() + (images >= high).long(), truth, where)
        return made

    candidates = [(low / 100, high / 100) for low in range(30, 65, 5) for high in range(60, 95, 5) if low < high]
    low, high = max(candidates, key=lambda pair: sum(overlap(*pair, trained).dice().values()))
    return overlap(low, high, tested).dice()


def in_words(dice: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4f}" for name, value in dice.items())


def median_seconds(seconds: Sequence[float]) -> float:
    """Median of the steps after the first, which also pays for what is done once."""
    return statistics.median(seconds[1:] or seconds)


def report(
    options: argparse.Namespace,
    losses: list[float],
    seconds: list[float],
    dice: dict[str, float],
    baseline: dict[str, float],
    peak_tensor_bytes: int | None = None,
) -> None:
    """Prints Dice, the median seconds of a step and its peak memory; writes the record where --json says."""
    print(f"Dice on held-out slices: {in_words(dice)}")
    print(f"Dice of two thresholds:  {in_words(baseline)}")
    median = median_seconds(seconds) if seconds else None
    if median is not None:
        print(f"seconds per step (median): {median:.4f}")
    if peak_tensor_bytes is not None:
        print(f"peak tensor memory of a step: {peak_tensor_bytes / 2**20:.1f} MiB")
    if options.json:
        record = {
            "arguments": vars(options),
            "losses": losses,
            "seconds": seconds,
            "median_seconds": median,
            "peak_tensor_bytes": peak_tensor_bytes,
            "dice": dice,
            "dice_of_thresholds": baseline,
        }
        write_json(options.json, record)


def write_json(path: str, record: dict[str, Any]) -> None:
    """Writes the record to a file, whole or not at all; "-" prints it on one line."""
    if path == "-":
        print(json.dumps(record))
        return
    partial = f"{path}.{os.getpid()}"
    Path(partial).write_text(json.dumps(record, indent=1) + "\n")
    os.replace(partial, path)


def draw(path: str, title: str, panels: Iterable[tuple[str, Tensor]]) -> None:
    """Writes a picture with panels side by side: images (H, W) of T1 in grey, of class numbers in colours."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    shown = list(panels)
    colours = ("black", "indianred", "ivory")
    figure, axes = pyplot.subplots(1, len(shown), figsize=(3.2 * len(shown), 4), layout="constrained")
    for axis, (name, image) in zip(axes, shown, strict=True):
        if image.is_floating_point():
            axis.imshow(image, cmap="gray", origin="lower", vmin=0, vmax=1)
        else:
            axis.imshow(image, cmap=ListedColormap(colours), origin="lower", vmin=0, vmax=2, interpolation="nearest")
        axis.set_title(name)
        axis.set_axis_off()
    legend = [
        Patch(facecolor=colour, edgecolor="gray", label=name) for colour, name in zip(colours, CLASSES, strict=True)
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
