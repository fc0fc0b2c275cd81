"""Parts in turn on the null card: the peak memory of an image decoder as torch's allocator for CUDA counts it.

    python tests/null_card/build.py PYTHON benchmarks/turns/null_peak.py --save

PYTHON has torch's build for CUDA and diffusers. Nothing is computed and nothing is timed: kernels are launched in form,
and allocate what they need. What leaves the card is copied to pinned memory of the host. Every size has a process of
its own.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

import distconv
import distconv.rules.resize as resize
from benchmarks import harness
from benchmarks.harness import Record
from benchmarks.planning.null_peak import IN_FORM, SD
from benchmarks.table import Table
from distconv.agreement.samples import SampledElements

RESULT = "turns-peak-null"
SIZES = (64, 128, 256)
"""Height and width of the latent; a picture has eight times as many rows."""

PARTS = "height=8"
SHARES = (0.25, 0.1)
"""Limits of the parts' tensors, of what one process takes beside its weights."""

ABOUT = f"""\
`python tests/null_card/build.py PYTHON benchmarks/turns/null_peak.py --save`: cuDNN {{cudnn}}.

The decoder of Stable Diffusion (diffusers' `AutoencoderKL` with its usual width), in float16, decodes one latent in
one process and in eight parts in turn (`{PARTS}`), without a limit and within limits that are a share of what one
process takes beside its weights. Memory is that of the [null card](../gpu.md#the-null-card): torch's allocator, what
its kernels allocate and cuDNN's workspaces are real, but nothing is computed. **Times are not known.**

* **Peak**: the most that the allocator had given out at once during a first and a second call, with the weights, the
  latent and the picture.
* **Reserved**: the most that the allocator had from the card, with what it kept for later.
* **Pinned**: the most pinned memory of the host that held, or was kept for, what left the card. Torch rounds each piece
  up to a power of two.
"""


def calls(decoder: Any, latent: torch.Tensor) -> dict[str, int]:
    """The peaks of two calls, in bytes."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.reset_peak_host_memory_stats()
    found = {}
    for name in ("first", "later"):
        torch.cuda.reset_peak_memory_stats()
        with torch.inference_mode():
            decoder.decode(latent, return_dict=False)
        found[name] = torch.cuda.max_memory_allocated()
    host = torch.cuda.host_memory_stats()["active_bytes.peak"]
    return found | {"reserved": torch.cuda.max_memory_reserved(), "pinned": host}


def child(size: int) -> Record:
    """The peaks of all ways."""
    import diffusers

    warnings.simplefilter("ignore")
    # What parts find unseen changes of parameters by has no numbers here, as nothing is computed.
    SampledElements.changed = lambda *args: []  # type: ignore[method-assign]
    # Which element an enlarged one repeats is read off torch's kernel. That of the card computes nothing here.
    taps = resize.nearest_taps
    resize.nearest_taps = lambda *args: taps(*args[:-2], args[-2].cpu(), args[-1])
    decoder = diffusers.AutoencoderKL(**SD).eval().to("cuda", torch.float16)
    decoder.encoder = torch.nn.Identity()
    latent = torch.zeros(1, 4, size, size, dtype=torch.float16, device="cuda")
    weights = sum(p.numel() * p.element_size() for p in decoder.parameters())
    found: Record = {"size": size, "weights": weights, "alone": calls(decoder, latent), "turns": {}}
    for share in (None, *SHARES):
        limit = None if share is None else int(share * (found["alone"]["later"] - weights))
        parts = copy.deepcopy(decoder)
        distconv.in_turn(parts, PARTS, memory=limit)
        found["turns"][str(share)] = {"limit": limit, **calls(parts, latent)}
    return found


def table(records: list[Record]) -> Table:
    """A row for each size and way."""

    def row(record: Record, way: str, found: dict[str, Any]) -> tuple[str, ...]:
        pixels = 8 * record["size"]
        peaks = f"{_mib(found['first'])} / {_mib(found['later'])}"
        share = f"{found['later'] / record['alone']['later']:.2f}"
        return f"{pixels}x{pixels}, {way}", peaks, share, _mib(found["reserved"]), _mib(found["pinned"])

    rows = []
    for record in records:
        rows.append(row(record, f"one process, weights {_mib(record['weights'])}", record["alone"]))
        for found in record["turns"].values():
            limit = found["limit"]
            rows.append(row(record, "in turn" if limit is None else f"within {_mib(limit)}", found))
    headings = ("picture, way", "peak of the first / a later call", "of one process", "reserved", "pinned")
    return Table("A decoder in turn as the allocator counts it, MiB", headings, rows)


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f}"


def main() -> None:
    made = harness.parser(__doc__, RESULT)
    made.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="of the latent (default: all of the table)")
    made.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.child is not None:
        print(json.dumps(child(options.child)), flush=True)
        return
    records = [harness.child(__file__, "--child", str(size), **IN_FORM) for size in options.sizes]
    about = ABOUT.format(cudnn=torch.backends.cudnn.version())
    harness.finish(options, RESULT, "Parts in turn on the null card", about, [table(records)])


if __name__ == "__main__":
    main()
