"""Decodes one large picture from a latent, as image generators do at their end, where memory is used up first.

The decoder has the layers of those in diffusers: 3x3 convolutions, group norms, attention in the middle, and nearest
upsampling. Its weights are random, so the picture shows nothing; its mean shows that ranks
compute what one process does.

python examples/vae_decode.py
python -m distconv run --partition height=2 examples/vae_decode.py
python -m distconv run --parts height=8 --memory 100MB examples/vae_decode.py
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.GroupNorm(8, channels),
            nn.SiLU(),
            nn.Conv2d(channels, filters, 3, padding=1),
            nn.GroupNorm(8, filters),
            nn.SiLU(),
            nn.Conv2d(filters, filters, 3, padding=1),
        )
        self.shortcut = nn.Identity() if channels == filters else nn.Conv2d(channels, filters, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + self.shortcut(x)


class Attention(nn.Module):
    """Every position of the latent looks at every other one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(8, channels)
        self.query, self.key, self.value, self.out = (nn.Linear(channels, channels) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        query, key, value = (part(tokens)[:, None] for part in (self.query, self.key, self.value))
        found = nn.functional.scaled_dot_product_attention(query, key, value)[:, 0]
        return x + self.out(found).transpose(1, 2).reshape(x.shape)


def decoder(width: int) -> nn.Module:
    """From a latent (N, 4, h, w) to a picture (N, 3, 8h, 8w)."""
    wide = [4 * width, 4 * width, 2 * width, width]
    layers: list[nn.Module] = [nn.Conv2d(4, wide[0], 3, padding=1), Residual(wide[0], wide[0]), Attention(wide[0])]
    for channels, filters in itertools.pairwise(wide):
        layers += [Residual(channels, filters), nn.Upsample(scale_factor=2), nn.Conv2d(filters, filters, 3, padding=1)]
    return nn.Sequential(*layers, nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Decodes, and returns the mean and the deviation of the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=768, help="of the picture, a multiple of 8")
    parser.add_argument("--width", type=int, default=32)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = decoder(options.width).eval()
    latent = torch.randn(1, 4, options.size // 8, options.size // 8)
    begin = time.perf_counter()
    with torch.inference_mode():
        picture = model(latent)
        numbers = [picture.mean().item(), picture.std().item()]
    print(f"{tuple(picture.shape)}: mean {numbers[0]:.5f}, deviation {numbers[1]:.5f}")
    print(f"decoded in {time.perf_counter() - begin:.1f} s", flush=True)
    return numbers


if __name__ == "__main__":
    main()
