"""Peak memory as torch's allocator counts it, on the null card: plain torch beside mucudnn within several limits.

    python tests/null_card/build.py PYTHON benchmarks/planning/null_peak.py --save      # every network; about an hour
    python tests/null_card/build.py PYTHON benchmarks/planning/null_peak.py --only vgg16

PYTHON has torch's build for CUDA, torchvision and diffusers. Nothing is computed and nothing is timed: kernels are
launched in form, and allocate what they need. A step is a forward and a backward pass, of a decoder a forward pass.
Every network runs in processes of its own, one for each card, and one under torch.backends.cudnn.benchmark.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
from torch import nn

import mucudnn
from benchmarks.table import RESULTS, Table, conditions, save, show
from mucudnn.networks.models import NETWORKS, UNet3d

RESULT = "peak-null"
CARDS = {"H100, 80 GB": 81078, "24 GiB": 24576}
"""MiB of memory."""

STOCK, BENCHMARK = "torch", "torch, benchmark"
LIMITS = {"limit 0": "0", "limit 64 MiB": "64MiB", "limit 512 MiB": "512MiB"}
ARMS = (STOCK, BENCHMARK, *LIMITS)
FINENESS = 32
"""The largest batch is found to so many parts of itself."""

ABOUT = """\
`python tests/null_card/build.py PYTHON benchmarks/planning/null_peak.py --save`: {conditions} cuDNN {cudnn}.

A step is a forward and a backward pass, of the two decoders a forward pass. Memory is that of the
[null card](../gpu.md#the-null-card): torch's allocator, its kernels' allocations and cuDNN's workspaces are real, but nothing
is computed. **Times are not known**, so neither is which of these arms is faster.

* **How algorithms were picked**: plain torch takes the first engine that cuDNN's heuristic proposes and that runs. With
  `benchmark`, and within mucudnn's limits, engines are compared by the card's clock. It counts operations, takes engines
  with a workspace to be 1.6 times as fast as those without, and varies by a made-up factor between engines. Workspaces are
  those of the plans that it favours. A real card will favour others, within the same limits.
* A limit binds what mucudnn chooses. Convolutions that it leaves to torch's own kernel take what that takes, as with the
  limit 0, where all of them are.
* The **first step** includes the search for algorithms; `benchmark` tries all that cuDNN proposes, whatever their
  workspace, where memory allows.
* The largest batch is found to 1/32 of itself, with a first step and a second one. Within a limit it is looked for up to
  plain torch's. The context of CUDA, some hundred MiB, is not counted. The engines are those of an H100 on both cards.
* cuDNN's workspaces of batch norms, where torch uses them, are taken for 0.
* Networks of torchvision: AlexNet, VGG-16 and the ResNets (224x224, float32, TF32 as torch has it for convolutions). Of this
  project: the U-Net (128³) and CosmoFlow (4 x 128³). Of diffusers: the decoders of Stable Diffusion (float16, 64x64 latents,
  512x512 pixels) and of Wan (bfloat16, 17 frames of 480x832 pixels).
"""

Step = Callable[[int], None]


def _training(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Step:
    model = build().cuda()

    def step(batch: int) -> None:
        model(torch.empty(batch, *shape, device="cuda")).sum().backward()
        model.zero_grad()

    return step


def _decoding(name: str, dtype: torch.dtype, shape: tuple[int, ...], **options: Any) -> Step:
    import diffusers

    decoder = getattr(diffusers, name)(**options)
    decoder.encoder = nn.Identity()
    decoder.eval().to("cuda", dtype)

    @torch.no_grad()
    def step(batch: int) -> None:
        decoder.decode(torch.empty(batch, *shape, dtype=dtype, device="cuda"))

    return step


def _vision(name: str) -> Step:
    import torchvision

    return _training(lambda: torchvision.models.get_model(name, weights=None), (3, 224, 224))


SD: dict[str, Any] = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}


@dataclass(frozen=True)
class Subject:
    """A network, and the batch whose peaks are shown."""

    build: Callable[[], Step]
    batch: int


SUBJECTS = {
    "alexnet": Subject(lambda: _vision("alexnet"), 256),
    "vgg16": Subject(lambda: _vision("vgg16"), 64),
    "resnet18": Subject(lambda: _vision("resnet18"), 256),
    "resnet50": Subject(lambda: _vision("resnet50"), 128),
    "unet3d": Subject(lambda: _training(UNet3d, (1, 128, 128, 128)), 2),
    "cosmoflow": Subject(lambda: _training(NETWORKS["cosmoflow"].build, NETWORKS["cosmoflow"].input_shape), 16),
    "Stable Diffusion": Subject(lambda: _decoding("AutoencoderKL", torch.float16, (4, 64, 64), **SD), 4),
    "Wan": Subject(lambda: _decoding("AutoencoderKLWan", torch.bfloat16, (16, 5, 60, 104)), 2),
}


@contextmanager
def _under(arm: str) -> Iterator[None]:
    torch.backends.cudnn.benchmark = arm == BENCHMARK
    if arm in LIMITS:
        with mucudnn.patched(workspace_limit=LIMITS[arm], database=":memory:", progress="off", check="off"):
            yield
    else:
        yield


def measured(step: Step, batch: int) -> dict[str, float] | None:
    """Peaks, in bytes, of the first step with a batch and of the next one; `None` where memory does not suffice."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    try:
        step(batch)
        first = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(batch)
    except torch.OutOfMemoryError:
        return None
    return {"first": first, "later": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def largest(step: Step) -> int:
    """The largest batch that fits, to one part of `FINENESS`; 0 where not even one sample does."""
    fits, fails = 0, 1
    while measured(step, fails) is not None:
        fits, fails = fails, 2 * fails
    while fails - fits > max(1, fails // FINENESS):
        middle = (fits + fails) // 2
        fits, fails = (fits, middle) if measured(step, middle) is None else (middle, fails)
    return fits


def largest_up_to(step: Step, most: int) -> int:
    """As `largest`, of batches that are no larger than plain torch's, as every batch is planned anew."""
    batch, width = most, max(1, most // FINENESS)
    while batch > 0 and measured(step, batch) is None:
        batch -= width
    return max(0, batch)


def child(name: str, with_benchmark: bool, with_peaks: bool) -> None:
    """Measures a network on this process's card, and prints the figures."""
    warnings.simplefilter("ignore")
    step, found = SUBJECTS[name].build(), dict[str, Any]()
    for arm in (BENCHMARK,) if with_benchmark else tuple(arm for arm in ARMS if arm != BENCHMARK):
        with _under(arm):
            found[arm] = {"peaks": measured(step, SUBJECTS[name].batch)} if with_benchmark or with_peaks else {}
            if arm == STOCK:
                found[arm]["largest"] = largest(step)
            elif arm != BENCHMARK:
                found[arm]["largest"] = largest_up_to(step, found[STOCK]["largest"])
    # Threads that cuDNN compiles engines with would end the process with an error after its work is done.
    print(json.dumps(found), flush=True)
    os._exit(0)


def asked(name: str, mebibytes: int, *options: str) -> dict[str, Any]:
    """The figures of a process of its own."""
    # Read when torch is imported: only what is launched in form allocates as on a card.
    switches = {"NULL_CARD_ARITHMETIC": "0", "NULL_CARD_CONVOLUTIONS": "0", "NULL_CARD_MIB": str(mebibytes)}
    command = [sys.executable, __file__, "--child", name, *options]
    ended = subprocess.run(command, env={**os.environ, **switches}, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise SystemExit(f"{name}: exit code {ended.returncode}\n{ended.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _gib(found: dict[str, float] | None, *names: str) -> str:
    if found is None:
        return "does not fit"
    return " / ".join(f"{found[name] / 2**30:.2f}" for name in names)


def tables(figures: dict[str, Any]) -> list[Table]:
    """Of peaks, of what is reserved, and of the largest batches."""
    first, *others = CARDS
    peaks, reserved, batches = [], [], []
    for name, found in figures.items():
        row, cells = f"{name}, {SUBJECTS[name].batch}", [found[first][arm]["peaks"] for arm in ARMS]
        peaks.append((row, *(_gib(cell, "first", "later") for cell in cells)))
        reserved.append((row, *(_gib(cell, "reserved") for cell in cells)))
        for card in (first, *others):
            cells = [found[card][arm]["largest"] for arm in ARMS if arm != BENCHMARK]
            batches.append((f"{name}, {card}", *map(str, cells)))
    heads = ("network, batch", *ARMS)
    return [
        Table("Peak of the first step / of a later one, GiB", heads, peaks),
        Table("Reserved by torch's allocator at most, GiB", heads, reserved),
        Table("Largest batch that fits", ("network, card", *(arm for arm in ARMS if arm != BENCHMARK)), batches),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="networks (default: all)")
    parser.add_argument("--save", action="store_true", help=f"keep the figures in benchmarks/results/{RESULT}.*")
    parser.add_argument("--child", choices=SUBJECTS, help=argparse.SUPPRESS)
    parser.add_argument("--benchmark", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--peaks", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.benchmark, options.peaks)
        return
    kept, about = RESULTS / f"{RESULT}.json", ABOUT.format(conditions=conditions(), cudnn=torch.backends.cudnn.version())
    figures: dict[str, Any] = {}
    for name in options.only:
        found = {}
        for number, (card, mebibytes) in enumerate(CARDS.items()):
            found[card] = asked(name, mebibytes, *(() if number else ("--peaks",)))
            if number == 0:
                found[card] |= asked(name, mebibytes, "--benchmark")
        figures[name] = found
        if options.save:  # after every network, as the next one takes minutes
            known = {**(json.loads(kept.read_text()) if kept.exists() else {}), **figures}
            ordered = {name: known[name] for name in SUBJECTS if name in known}
            save(RESULT, "Peak memory on the null card", about, ordered, tables(ordered))
    show(tables({name: figures[name] for name in options.only}))


if __name__ == "__main__":
    main()
