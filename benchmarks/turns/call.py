"""One call in one process, whole or in parts that are computed in turn: its seconds, and the memory that it needs.

    python benchmarks/turns/call.py AutoencoderKL
    python benchmarks/turns/call.py AutoencoderKL --tiled        # in overlapping tiles, as diffusers does
    python benchmarks/turns/call.py AutoencoderKL --parts height=8 --memory 64MiB
    python benchmarks/turns/call.py UNet3d --parts depth=8

Prints one line of JSON. `memory` is by how much the resident memory of the process grew at most, in bytes, and so
holds what libraries take besides tensors; `peak` is all of it. Linux tells both. `weights` are the bytes of the
parameters. `first` and `seconds` are the processor seconds of the first call and of the second one, for which all plans
are made.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor, nn

import distconv
from benchmarks.turns.decode import DECODERS, decoder, latent, tile
from mucudnn.networks.models import UNet3d

UNET = "UNet3d"
WIDE = "AutoencoderKL-wide"
"""The image decoder with its usual channels; those of `decode.py` have an eighth."""

VOLUME = 128
"""The extent of the volume that the U-Net trains on."""

Numbers = dict[str, Tensor]


def decoding(name: str, size: int | None, tiled: bool) -> tuple[nn.Module, Callable[[], Numbers]]:
    """A decoder, and a call of it."""
    if name == WIDE:
        name, options = "AutoencoderKL", {"block_out_channels": (128, 256, 512, 512), "norm_num_groups": 32}
        DECODERS[name] = {**DECODERS[name][0], **options}, DECODERS[name][1]
    vae, z = decoder(name), latent(name, size)
    if tiled:
        tile(vae, z.shape[-1])

    def decode() -> Numbers:
        with torch.inference_mode():
            return {"result": vae.decode(z, return_dict=False)[0]}

    return vae, decode


def training(size: int | None) -> tuple[nn.Module, Callable[[], Numbers]]:
    """A 3-D U-Net, and a training step of it."""
    torch.manual_seed(0)
    model, extent = UNet3d(width=8), size or VOLUME
    x = torch.randn(1, 1, extent, extent, extent, generator=torch.Generator().manual_seed(1))

    def step() -> Numbers:
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    return model, step


class Growth:
    """A context; afterwards ``peak`` is the most resident memory of the process within it, and ``bytes`` by how much
    that was more than at its beginning.
    """

    def __enter__(self) -> Growth:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
        self._before = _status("VmRSS")
        return self

    def __exit__(self, *error: Any) -> None:
        self.peak = _status("VmHWM")
        self.bytes = self.peak - self._before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    works = *DECODERS, WIDE, UNET
    parser.add_argument("work", choices=works, metavar="WORK", help=", ".join(works))
    parser.add_argument("--size", type=int, help="height and width of a latent, extent of a volume")
    parser.add_argument("--tiled", action="store_true", help="a decoder with diffusers' enable_tiling")
    parser.add_argument("--parts", metavar="AXIS=PARTS,...", help="computed in turn (default: one process)")
    parser.add_argument("--memory", metavar="BYTES", help="limit of the parts")
    parser.add_argument("--dtype", default="float32", choices=("float64", "float32"))
    parser.add_argument("--save", metavar="FILE", help="keep the numbers")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, options.dtype))
    if options.work == UNET:
        model, call = training(options.size)
    else:
        model, call = decoding(options.work, options.size, options.tiled)
    if options.parts:
        distconv.in_turn(model, options.parts, memory=options.memory)
    found: dict[str, Any] = {"weights": sum(p.numel() * p.element_size() for p in model.parameters())}
    with Growth() as growth:
        for name in ("first", "seconds"):
            numbers: Numbers = {}  # those of the first call go before the second one
            began = time.process_time()
            numbers = call()
            found[name] = time.process_time() - began
    print(json.dumps({**found, "memory": growth.bytes, "peak": growth.peak}), flush=True)
    if options.save:
        torch.save(numbers, options.save)


if __name__ == "__main__":
    main()
