"""One call in one process, whole or in parts that are computed in turn: its seconds, and the memory that it needs.

    python benchmarks/turns/call.py AutoencoderKL
    python benchmarks/turns/call.py AutoencoderKL --parts height=8 --memory 64MiB
    python benchmarks/turns/call.py UNet3d --parts depth=8

The decoders are those of diffusers, of full depth and small width, with random weights; nothing is downloaded. Prints
one line of JSON. `memory` is by how much the resident memory of the process grew at most, in bytes, and so holds what
libraries take besides tensors; `peak` is all of it. Linux tells both. `weights` are the bytes of the parameters.
`first` and `seconds` are the processor seconds of the first call and of the second one, for which all plans are made.
"""

from __future__ import annotations

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
from benchmarks.harness import parser
from mucudnn.networks.models import UNet3d

IMAGE: dict[str, Any] = {"block_out_channels": (16, 32, 64, 64), "norm_num_groups": 8}
BLOCKS: dict[str, Any] = {
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}
LTX: dict[str, Any] = {"block_out_channels": (16, 32, 64, 64), "decoder_block_out_channels": (16, 32, 64, 64)}

DECODERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "AutoencoderKL": ({**IMAGE, **BLOCKS}, (1, 4, 64, 64)),
    "AutoencoderKL-wide": ({"block_out_channels": (128, 256, 512, 512), **BLOCKS}, (1, 4, 64, 64)),
    "AutoencoderKLWan": ({"base_dim": 8, "z_dim": 16}, (1, 16, 3, 32, 32)),
    "AutoencoderKLHunyuanVideo": (IMAGE, (1, 16, 3, 16, 16)),
    "AutoencoderKLCogVideoX": (IMAGE, (1, 16, 3, 32, 32)),
    "AutoencoderKLLTXVideo": ({**LTX, "latent_channels": 16}, (1, 16, 3, 16, 16)),
}
"""{class in diffusers: what it is built of, and the shape of its latent (N, C, [frames,] height, width)}."""

UNET, VOLUME = "UNet3d", 128
"""A 3-D U-Net, and the extent of the volume that it trains on."""

Numbers = dict[str, Tensor]


def decoding(name: str, size: int | None) -> tuple[nn.Module, Callable[[], Numbers]]:
    """A decoder with the weights of seed 0, and a call of it."""
    import diffusers

    options, shape = DECODERS[name]
    torch.manual_seed(0)
    vae = getattr(diffusers, name.partition("-")[0])(**options).eval()
    shape = shape if size is None else (*shape[:-2], size, size)
    z = torch.randn(shape, generator=torch.Generator().manual_seed(1))

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


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{name}:")).split()[1])


def main() -> None:
    made = parser(__doc__)
    works = *DECODERS, UNET
    made.add_argument("work", choices=works, metavar="WORK", help=", ".join(works))
    made.add_argument("--size", type=int, help="height and width of a latent, extent of a volume")
    made.add_argument("--parts", metavar="AXIS=PARTS,...", help="computed in turn (default: one process)")
    made.add_argument("--memory", metavar="BYTES", help="limit of the parts")
    made.add_argument("--dtype", default="float32", choices=("float64", "float32"))
    made.add_argument("--keep", metavar="FILE", help="keep the numbers")
    options = made.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, options.dtype))
    model, call = training(options.size) if options.work == UNET else decoding(options.work, options.size)
    if options.parts:
        distconv.in_turn(model, options.parts, memory=options.memory)
    found: dict[str, Any] = {"weights": sum(p.numel() * p.element_size() for p in model.parameters())}
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew
    before = _status("VmRSS")
    for name in ("first", "seconds"):
        numbers: Numbers = {}  # those of the first call go before the second one
        began = time.process_time()
        numbers = call()
        found[name] = time.process_time() - began
    peak = _status("VmHWM")
    if options.keep:
        torch.save(numbers, options.keep)
    print(json.dumps({**found, "memory": peak - before, "peak": peak}), flush=True)


if __name__ == "__main__":
    main()
