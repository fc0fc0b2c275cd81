"""Decodes a random latent with a decoder of diffusion models, as a script of one device does it: it knows of no ranks.

    python benchmarks/turns/decode.py AutoencoderKL            # in one process
    python benchmarks/turns/decode.py AutoencoderKL --tiled    # in overlapping tiles, as diffusers does
    python -m distconv run --partition height=4 benchmarks/turns/decode.py AutoencoderKL

The decoders are those of diffusers, of full depth and small width, with random weights; nothing is downloaded. Shown
are the shape of the result, its mean and its standard deviation, the seconds, and the peak memory: the bytes of all
tensors that are alive at once, weights included, as torch's memory profiler counts them. `decoders.py`, beside
this file, compares the ways.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

IMAGE: dict[str, Any] = {"block_out_channels": (16, 32, 64, 64), "norm_num_groups": 8}
WAN: dict[str, Any] = {"base_dim": 8, "z_dim": 16}
LTX: dict[str, Any] = {"block_out_channels": (16, 32, 64, 64), "decoder_block_out_channels": (16, 32, 64, 64)}

DECODERS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "AutoencoderKL": (
        {
            **IMAGE,
            "down_block_types": ["DownEncoderBlock2D"] * 4,
            "up_block_types": ["UpDecoderBlock2D"] * 4,
            "layers_per_block": 2,
        },
        (1, 4, 64, 64),
    ),
    "AutoencoderKLWan": (WAN, (1, 16, 3, 32, 32)),
    "AutoencoderKLHunyuanVideo": (IMAGE, (1, 16, 3, 16, 16)),
    "AutoencoderKLCogVideoX": (IMAGE, (1, 16, 3, 32, 32)),
    "AutoencoderKLLTXVideo": ({**LTX, "latent_channels": 16}, (1, 16, 3, 16, 16)),
    "AutoencoderKLQwenImage": (WAN, (1, 16, 1, 32, 32)),
}
"""{class in diffusers: what it is built of, and the shape of its latent (N, C, [frames,] height, width)}."""


def decoder(name: str) -> Any:
    """With the weights of seed 0, in evaluation mode."""
    import diffusers

    options, _ = DECODERS[name]
    torch.manual_seed(0)
    return getattr(diffusers, name)(**options).eval()


def latent(name: str, size: int | None) -> Tensor:
    """Random numbers; ``size`` is its height and width."""
    _, shape = DECODERS[name]
    shape = shape if size is None else (*shape[:-2], size, size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tile(vae: Any, size: int) -> None:
    """Makes it decode in tiles, of a quarter of the height and width of the result, or of the least that it accepts."""
    vae.enable_tiling()
    ratio = getattr(vae, "spatial_compression_ratio", 8)
    for name in ("tile_latent_min_size", "tile_sample_min_size"):
        if hasattr(vae, name):
            setattr(vae, name, max(size // 4, 4) * (1 if "latent" in name else ratio))
    accepted = inspect.signature(vae.enable_tiling).parameters
    least, stride = max(size // 4, 4) * ratio, max(3 * size // 16, 3) * ratio
    wanted = {f"tile_sample_min_{dim}": least for dim in ("height", "width")}
    wanted |= {f"tile_sample_stride_{dim}": stride for dim in ("height", "width")}
    if accepted:
        vae.enable_tiling(**{name: value for name, value in wanted.items() if name in accepted})


def cast(vae: Any) -> list[nn.Upsample]:
    """Its layers that compute in float32 whatever the type of their input is: those of Wan and QwenImage."""
    return [module for module in vae.modules() if isinstance(module, nn.Upsample) and type(module) is not nn.Upsample]


def keep_type(vae: Any) -> None:
    """Makes these layers compute in the type of their input."""
    for module in cast(vae):
        module.forward = functools.partial(nn.Upsample.forward, module)  # type: ignore[method-assign]


def main() -> None:
    options = _options()
    torch.set_default_dtype(getattr(torch, options.dtype))
    vae, z = decoder(options.decoder), latent(options.decoder, options.size)
    if options.keep_type:
        keep_type(vae)
    if options.tiled:
        tile(vae, z.shape[-1])
    weights = sum(p.numel() * p.element_size() for p in vae.parameters())
    with peak() as most, torch.inference_mode() if options.inference_mode else torch.no_grad():
        began = time.perf_counter()
        y = vae.decode(z, return_dict=False)[0]
        seconds = time.perf_counter() - began
    found: dict[str, Any] = {"casts": bool(cast(vae))}
    found |= {"decoder": options.decoder, "latent": list(z.shape), "result": list(y.shape), "seconds": seconds}
    found |= {"peak": weights + most(), "weights": weights, "mean": y.mean().item(), "deviation": y.std().item()}
    print(json.dumps(found), flush=True)
    if options.save:
        torch.save(y, options.save)


class peak:
    """A context in which the bytes of tensors are counted; calling what it gives returns the most at once."""

    def __enter__(self) -> Callable[[], int]:
        self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self.profile.__enter__()
        return lambda: self.most

    def __exit__(self, *error: Any) -> None:
        self.profile.__exit__(*error)
        results: Any = self.profile.profiler
        self.most = max(_allocated(results.kineto_results.experimental_event_tree()), default=0)


def _allocated(events: Any) -> Iterator[int]:
    for event in events:
        if event.tag.name == "Allocation":
            yield event.extra_fields.total_allocated
        yield from _allocated(event.children)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoder", nargs="?", default="AutoencoderKL", choices=DECODERS)
    parser.add_argument("--size", type=int, help="height and width of the latent")
    parser.add_argument("--tiled", action="store_true", help="with diffusers' enable_tiling")
    parser.add_argument("--dtype", default="float64", choices=("float64", "float32"))
    parser.add_argument("--inference-mode", action="store_true", help="torch.inference_mode instead of torch.no_grad")
    parser.add_argument("--keep-type", action="store_true", help="nothing is cast to float32")
    parser.add_argument("--save", metavar="FILE", help="keep the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
