"""Decodes a random latent with diffusers and keeps the result: an ordinary script, which knows of no parts.

    python benchmarks/turns/plain.py AutoencoderKL result.pt --size 128
    python benchmarks/turns/plain.py AutoencoderKL result.pt --size 128 --tiled
    python -m distconv run --parts height=8 --memory 100MiB benchmarks/turns/plain.py AutoencoderKL result.pt --size 128

It needs the extra `models`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from benchmarks.distributed.decode import DECODERS, decoder, latent, tile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoder", choices=DECODERS)
    parser.add_argument("result", help="file for the result")
    parser.add_argument("--size", type=int, default=128, help="height and width of the latent (default %(default)s)")
    parser.add_argument("--tiled", action="store_true", help="with diffusers' enable_tiling")
    options = parser.parse_args()
    vae, z = decoder(options.decoder), latent(options.decoder, options.size)
    if options.tiled:
        tile(vae, options.size)
    with torch.inference_mode():
        result = vae.decode(z, return_dict=False)[0]
    torch.save(result, options.result)


if __name__ == "__main__":
    main()
