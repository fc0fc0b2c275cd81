"""Peak memory as torch's allocator counts it, on the null card: plain torch beside mucudnn within several limits.

    python tests/null_card/build.py PYTHON benchmarks/planning/null_peak.py --save --only vgg16

PYTHON has torch's build for CUDA, torchvision and diffusers. Nothing is computed and nothing is timed: kernels are
launched in form, and allocate what they need. A step is a forward and a backward pass, of a decoder a forward pass.
Every network runs in a process of its own. With `--save` the figures of each arm join those that are kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import mucudnn
from benchmarks import harness
from benchmarks.table import RESULTS, Table, write
from mucudnn.networks.models import NETWORKS, UNet3d

RESULT = "peak-null"
CARDS = {"H100, 80 GB": 81078, "24 GiB": 24576}
"""MiB of memory."""

STOCK, BENCHMARK = "torch", "torch, benchmark"
LIMITS = {"limit 0": "0", "limit 64 MiB": "64MiB", "limit 512 MiB": "512MiB"}
ARMS = (STOCK, BENCHMARK, *LIMITS)

ABOUT = """\
`python tests/null_card/build.py PYTHON benchmarks/planning/null_peak.py --save`: cuDNN {cudnn}.

A step is a forward and a backward pass, of the two decoders a forward pass. Memory is that of the
[null card](../gpu.md#the-null-card): torch's allocator, what its kernels allocate and cuDNN's workspaces are real, but
nothing is computed. **Times are not known**, so neither is which of these arms is faster.

* **How algorithms were picked**: plain torch takes the first engine that cuDNN's heuristic proposes and that runs.
  Under `benchmark`, and within mucudnn's limits, engines are compared by the card's clock. It counts operations, takes
  engines with a workspace for 1.6 times as fast as those without, and differs by a made-up factor between engines.
  Workspaces are those of the plans that it favours. A real card will favour others, within the same limits.
* A limit binds what mucudnn chooses. Convolutions that it leaves to torch's own kernel take what that takes, as all of
  them do within the limit 0.
* The **first step** includes the search for algorithms. `benchmark` tries ten that cuDNN proposes, whatever their
  workspaces, where memory allows.
* **The largest batch that fits** is found by attempts on a card of that memory: the allocator begins empty, and two
  steps must pass. A batch that is 2 % larger (by one sample, of less than 50) did not fit. The context of CUDA and
  whatever else is on a card come on top. The engines are those of an H100 for both cards.
* **Reserved** is no figure of a fresh process but in the first two columns: before the arms that follow, the same
  process has tried larger batches, of which segments may have stayed.
* Where a cell is empty it was not run.
* cuDNN's workspaces of batch norms, where torch uses them, are taken for 0.
* Networks of torchvision: AlexNet, VGG-16 and the ResNets (224x224, float32, TF32 as torch has it for convolutions). Of
  this project, float32, too: the U-Net (128³) and CosmoFlow (4 x 128³). Of diffusers: the decoders of Stable Diffusion
  (float16, 64x64 latents, 512x512 pixels) and of Wan (bfloat16, 17 frames of 480x832 pixels).
"""

Step = Callable[[int], None]


def _training(build: Callable[[], nn.Module], shape: tuple[int, ...]) -> Step:
    model = build().cuda()

    def step(batch: int) -> None:
        model.zero_grad()  # those of a step that failed, too
        model(torch.empty(batch, *shape, device="cuda")).sum().backward()

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


_NO_ENGINE = "unable to find an engine"
"""What torch's search says where memory suffices for none of those that it has tried."""


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
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or _NO_ENGINE in str(error):
            return None
        raise
    return {"first": first, "later": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest batch that fits: one that is 2 % larger, or larger by one, does not.

    Args:
        guess: that is tried first.
    """
    low, high, stride, batch = 0, math.inf, max(1, guess // 50), max(1, guess)
    while high - low > max(1, low // 50):
        if fits(batch):
            low = batch
        else:
            high = batch
        if high == math.inf or not low:
            batch, stride = max(1, batch + (stride if low else -stride)), 2 * stride
        else:
            batch = int(low + high) // 2
    return low


def child(name: str, arms: Sequence[str], guesses: dict[str, int], only_peaks: bool) -> None:
    """Measures a network, and prints the figures of the arms, each of whose batches the next one begins from."""
    warnings.simplefilter("ignore")
    subject, found = SUBJECTS[name], dict[str, Any]()
    step = subject.build()
    for arm in arms:
        with _under(arm):
            peaks = measured(step, subject.batch)
            if only_peaks:
                found[arm] = {"batch": subject.batch, "peaks": peaks, "largest": {}}
                continue
            guesses = guesses or _guesses(step, subject.batch, peaks)
        for card, memory in CARDS.items():
            os.environ["NULL_CARD_MIB"] = str(memory)  # the card reads it whenever it is asked for memory
            guesses[card] = largest(lambda batch, arm=arm: _fits(step, batch, arm), guesses[card])
        del os.environ["NULL_CARD_MIB"]
        found[arm] = {"batch": subject.batch, "peaks": peaks, "largest": dict(guesses)}
    # Threads that cuDNN compiles engines with would end the process with an error after its work is done.
    print(json.dumps(found), flush=True)
    os._exit(0)


def _guesses(step: Step, batch: int, peaks: dict[str, float] | None) -> dict[str, int]:
    """By card, the batch at which tensors take all its memory, as they grow from half of a batch to all of it."""
    half = measured(step, batch // 2)
    assert half and peaks, "it fits an H100"
    each = (peaks["later"] - half["later"]) / (batch - batch // 2)
    return {card: int(((memory << 20) - peaks["later"]) / each) + batch for card, memory in CARDS.items()}


def _fits(step: Step, batch: int, arm: str) -> bool:
    with _under(arm):
        return measured(step, batch) is not None


IN_FORM = {"NULL_CARD_ARITHMETIC": "0", "NULL_CARD_CONVOLUTIONS": "0"}
"""Read when torch is imported: only what is launched in form allocates as on a card."""


def asked(name: str, arms: Sequence[str], only_peaks: bool, guesses: dict[str, int] | None = None) -> dict[str, Any]:
    """The figures of a process of its own."""
    words = [
        "--child",
        json.dumps(guesses or {}),
        "--only",
        name,
        "--arms",
        *arms,
        *(["--peaks"] if only_peaks else []),
    ]
    found: dict[str, Any] = harness.child(__file__, *words, **IN_FORM)
    return found


def figures_of(name: str, arms: Sequence[str], only_peaks: bool) -> dict[str, Any]:
    """The figures of plain torch and of the arms. `benchmark` has a process of its own: in another one torch would take
    the kernels that it has chosen without."""
    found = asked(name, list(dict.fromkeys((STOCK, *(arm for arm in arms if arm != BENCHMARK)))), only_peaks)
    return found | (asked(name, [BENCHMARK], only_peaks, found[STOCK]["largest"]) if BENCHMARK in arms else {})


def _gib(found: dict[str, float] | None, *names: str) -> str:
    if found is None:
        return "does not fit"
    return " / ".join(f"{found[name] / 2**30:.2f}" for name in names)


def tables(figures: dict[str, Any]) -> list[Table]:
    """Of peaks, of what is reserved, and of batches."""
    peaks, reserved, batches = [], [], []
    for name, found in figures.items():
        title = f"{name}, {SUBJECTS[name].batch}"
        for rows, names in ((peaks, ("first", "later")), (reserved, ("reserved",))):
            rows.append((title, *(_gib(found[arm]["peaks"], *names) if arm in found else "" for arm in ARMS)))
        for card in CARDS:
            fitting = (str(found[arm]["largest"].get(card, "")) if arm in found else "" for arm in ARMS)
            batches.append((f"{name}, {card}", *fitting))
    return [
        Table("Peak of the first step / of a later one, GiB", ("network, batch", *ARMS), peaks),
        Table("Reserved by torch's allocator at most, GiB", ("network, batch", *ARMS), reserved),
        Table("The largest batch that fits", ("network, card", *ARMS), batches),
    ]


def main() -> None:
    made = harness.parser(__doc__, RESULT)
    made.add_argument("--only", nargs="+", choices=SUBJECTS, default=list(SUBJECTS), help="networks (default: all)")
    made.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), help="beside torch (default: all)")
    made.add_argument("--peaks", action="store_true", help="keep the largest batches as they are, which take minutes")
    made.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child is not None:
        child(options.only[0], options.arms, options.child, options.peaks)
        return
    path = RESULTS / f"{RESULT}.json"
    known = json.loads(path.read_text()) if options.save and path.exists() else {}
    for name in options.only:
        arms_of = known.setdefault(name, {})
        for arm, now in figures_of(name, options.arms, options.peaks).items():
            arms_of[arm] = now | {"largest": now["largest"] or arms_of.get(arm, now)["largest"]}
        if options.save:  # after every network, as the next one takes minutes
            write(RESULT, known)
    figures = {name: known[name] for name in SUBJECTS if name in known}
    about = ABOUT.format(cudnn=torch.backends.cudnn.version())
    harness.finish(options, RESULT, "Peak memory on the null card", about, tables(figures), figures)


if __name__ == "__main__":
    main()
