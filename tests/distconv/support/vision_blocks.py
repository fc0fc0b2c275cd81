"""Blocks of vision transformers, written in plain torch as their libraries do."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Tokens(nn.Module):
    """Patches, a class token and positions, as a vision transformer begins; ends with the class token, or the mean."""

    def __init__(self, inner: nn.Module, channels: int, positions: int, head: str = "class") -> None:
        super().__init__()
        self.patches, self.inner, self.head = nn.Conv2d(channels, channels, 2, 2), inner, head
        self.token = nn.Parameter(torch.randn(1, 1, channels))
        self.positions = nn.Parameter(torch.randn(1, positions + 1, channels))
        self.norm, self.classes = nn.LayerNorm(channels), nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        x = self.norm(self.inner(x))
        return self.classes(x[:, 0] if self.head == "class" else x[:, 1:].mean(1))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention and perceptron, each after a norm, with layer scale; written as one of three libraries writes it."""

    def __init__(self, channels: int, heads: int, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, heads
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        if kind == "torch":
            self.attention = nn.MultiheadAttention(channels, heads, batch_first=True)
        elif kind == "separate":
            self.q, self.k, self.v = (nn.Linear(channels, channels) for _ in range(3))
        else:
            self.qkv = nn.Linear(channels, 3 * channels)
        self.proj = nn.Linear(channels, channels)
        self.scale = nn.Parameter(torch.rand(channels))
        self.mlp = nn.Sequential(nn.Linear(channels, 2 * channels), nn.GELU(), nn.Linear(2 * channels, channels))

    def attend(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        if self.kind == "torch":
            return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]
        if self.kind == "separate":
            q, k, v = (f(x).view(n, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        q, k, v = self.qkv(x).reshape(n, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.kind == "fused":
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, t, c)
        weights = (q * 0.5 @ k.transpose(-2, -1)).softmax(-1)
        return (weights @ v).transpose(1, 2).reshape(n, t, c)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.proj(self.attend(self.norm1(x)))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Mixer(nn.Module):
    """Perceptrons over positions, then over channels."""

    def __init__(self, channels: int, positions: int) -> None:
        super().__init__()
        self.norm, self.positions = nn.LayerNorm(channels), nn.Linear(positions, positions)
        self.channels = nn.Sequential(nn.Linear(channels, 7), nn.GELU(), nn.Linear(7, channels))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions(self.norm(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(x)  # type: ignore[no-any-return]


class ConvNext(nn.Module):
    """torchvision's block: a depthwise convolution, the rest with channels last, and the input added in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.LayerNorm(channels)
        self.wide, self.narrow = nn.Linear(channels, 4 * channels), nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(torch.rand(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)
        result = self.scale * y
        result += x
        return result


class Diffusers(nn.Module):
    """An attention of a UNet or of a VAE: a group norm, 1x1 linear layers, the input added; perhaps to a text."""

    def __init__(self, channels: int, heads: int, text: int = 0) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.GroupNorm(4, channels)
        self.q = nn.Linear(channels, channels)
        self.k, self.v = nn.Linear(text or channels, channels), nn.Linear(text or channels, channels)
        self.out = nn.Linear(channels, channels)
        self.text = nn.Parameter(torch.randn(1, 7, text)) if text else None

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.view(n, c, h * w).transpose(1, 2)
        y = self.norm(y.transpose(1, 2)).transpose(1, 2)
        other = y if self.text is None else self.text.expand(n, -1, -1)
        q, k, v = (
            f(z).view(n, -1, self.heads, c // self.heads).transpose(1, 2)
            for f, z in ((self.q, y), (self.k, other), (self.v, other))
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, -1, c)
        return self.out(y).transpose(-1, -2).reshape(n, c, h, w) + x  # type: ignore[no-any-return]


class Reduced(nn.Module):
    """SegFormer's and PVT's attention: keys and values from a strided convolution of the tokens' map."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.q, self.kv = heads, nn.Linear(channels, channels), nn.Linear(channels, 2 * channels)
        self.reduce, self.norm = nn.Conv2d(channels, channels, 2, 2), nn.LayerNorm(channels)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.flatten(2).transpose(1, 2)
        few = self.norm(self.reduce(y.permute(0, 2, 1).reshape(n, c, h, w)).reshape(n, c, -1).permute(0, 2, 1))
        q = self.q(y).reshape(n, -1, self.heads, c // self.heads).permute(0, 2, 1, 3)
        k, v = self.kv(few).reshape(n, -1, 2, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        y = y + (weights @ v).transpose(1, 2).reshape(n, -1, c)
        return y.transpose(1, 2).view(n, c, h, w)


class Windows(nn.Module):
    """Swin's attention in windows, shifted or not, with a bias by relative position, on (N, H, W, C)."""

    def __init__(self, channels: int, heads: int, size: int, shift: int, second: bool = False) -> None:
        super().__init__()
        self.heads, self.size, self.shift, self.second = heads, size, shift, second
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.table = nn.Parameter(torch.randn((2 * size - 1) ** 2, heads))
        self.logit_scale = nn.Parameter(torch.rand(heads, 1, 1))
        at = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
        relative = (at[:, :, None] - at[:, None]).permute(1, 2, 0) + size - 1
        self.register_buffer("index", (relative[..., 0] * (2 * size - 1) + relative[..., 1]).flatten())

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        n, h, w, c = x.shape
        s, count = self.size, h * w // self.size**2
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
        x = x.view(n, h // s, s, w // s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(n * count, s * s, c)
        q, k, v = self.qkv(x).reshape(n * count, s * s, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        if self.second:
            weights = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.logit_scale.exp()
        else:
            weights = q @ k.transpose(-2, -1)
        bias = self.table[self.index].view(s * s, s * s, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        weights = weights + bias
        if self.shift:
            region = x.new_zeros((h, w))
            for i, rows in enumerate((slice(0, -s), slice(-s, -self.shift), slice(-self.shift, None))):
                region[rows] += i
            region = region.view(h // s, s, w // s, s).permute(0, 2, 1, 3).reshape(count, s * s)
            mask = (region.unsqueeze(1) - region.unsqueeze(2)).ne(0) * -100.0
            weights = weights.view(n, count, self.heads, s * s, s * s) + mask.unsqueeze(1).unsqueeze(0)
            weights = weights.view(-1, self.heads, s * s, s * s)
        x = self.proj((weights.softmax(-1) @ v).transpose(1, 2).reshape(n * count, s * s, c))
        x = x.view(n, h // s, w // s, s, s, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return x.permute(0, 3, 1, 2)


class Merging(nn.Module):
    """Swin's patch merging: four strided slices side by side, a norm and a linear layer."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * channels), nn.Linear(4 * channels, 2 * channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(0, 2, 3, 1)
        parts = [x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)]
        return self.reduction(self.norm(torch.cat(parts, -1))).permute(0, 3, 1, 2)  # type: ignore[no-any-return]


class MobileVit(nn.Module):
    """MobileViT's unfolding: positions at the same place of every patch attend to one another."""

    def __init__(self, channels: int, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner = nn.Conv2d(channels, channels, 1), inner

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = self.before(x).reshape(n * c * (h // 2), 2, w // 2, 2).transpose(1, 2)
        y = y.reshape(n, c, h * w // 4, 4).transpose(1, 3).reshape(n * 4, h * w // 4, c)
        y = self.inner(y).contiguous().view(n, 4, h * w // 4, c).transpose(1, 3)
        y = y.reshape(n * c * (h // 2), w // 2, 2, 2).transpose(1, 2).reshape(n, c, h, w)
        return torch.cat([x, y], 1)


class Separable(nn.Module):
    """MobileViT v2's attention of linear cost, on (N, C, pixels of a patch, patches)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels, self.qkv = channels, nn.Conv2d(channels, 1 + 2 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.reshape(n, c, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 2, 4).reshape(n, c, 4, -1)
        q, k, v = self.qkv(y).split([1, self.channels, self.channels], 1)
        context = (k * q.softmax(-1)).sum(-1, keepdim=True)
        y = self.out(v.relu() * context.expand_as(v))
        return y.reshape(n, c, 2, 2, h // 2, w // 2).permute(0, 1, 4, 2, 5, 3).reshape(n, c, h, w)


class Transposed(nn.Module):
    """EdgeNeXt's and XCiT's attention between channels, with a learned temperature."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        self.temperature, self.gamma = nn.Parameter(torch.rand(heads, 1, 1)), nn.Parameter(torch.rand(channels))

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        y = x.reshape(n, c, h * w).permute(0, 2, 1)
        q, k, v = self.qkv(y).reshape(n, h * w, 3, self.heads, c // self.heads).permute(2, 0, 3, 4, 1)
        weights = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * self.temperature
        y = y + self.gamma * self.proj((weights.softmax(-1) @ v).permute(0, 3, 1, 2).reshape(n, h * w, c))
        return y.reshape(n, h, w, c).permute(0, 3, 1, 2)


class Grid(nn.Module):
    """MaxViT's attention over a grid of dilated windows, on (N, C, H, W), with CoAtNet's bias."""

    def __init__(self, channels: int, heads: int, size: int) -> None:
        super().__init__()
        self.size, self.block = size, Block(channels, heads, "fused")

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        s = self.size
        y = x.permute(0, 2, 3, 1).view(n, s, h // s, s, w // s, c).permute(0, 2, 4, 1, 3, 5).contiguous()
        y = self.block(y.view(-1, s * s, c))
        y = y.view(n, h // s, w // s, s, s, c).permute(0, 3, 1, 4, 2, 5).contiguous().view(n, h, w, c)
        return y.permute(0, 3, 1, 2)


Build = Callable[[int, int, int], nn.Module]
"""Of channels, rows and columns."""

BLOCKS: dict[str, Build] = {
    "ViT, fused": lambda c, h, w: Tokens(Block(c, 4, "fused"), c, h * w // 4),
    "ViT, written out": lambda c, h, w: Tokens(Block(c, 4, "explicit"), c, h * w // 4, "mean"),
    "ViT, torch's": lambda c, h, w: Tokens(Block(c, 4, "torch"), c, h * w // 4),
    "ViT, separate": lambda c, h, w: Tokens(Block(c, 4, "separate"), c, h * w // 4, "mean"),
    "mixer": lambda c, h, w: Tokens(Mixer(c, h * w // 4 + 1), c, h * w // 4, "mean"),
    "ConvNeXt": lambda c, h, w: nn.Sequential(ConvNext(c), nn.Conv2d(c, c, 2, 2)),
    "UNet": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 3, padding=1), Diffusers(c, 4), nn.Conv2d(c, c, 1)),
    "VAE": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 3, padding=1), Diffusers(c, 1), nn.Conv2d(c, c, 1)),
    "UNet with text": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), Diffusers(c, 4, 6), nn.Conv2d(c, c, 1)),
    "SegFormer": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), Reduced(c, 4)),
    "Swin": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), Windows(c, 4, 2, 0)),
    "Swin, shifted": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), Windows(c, 4, 2, 1)),
    "Swin v2, shifted": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), Windows(c, 4, 2, 1, True)),
    "Swin, merging": lambda c, h, w: Merging(c),
    "MobileViT": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), MobileVit(c, Block(c, 4, "fused"))),
    "MobileViT v2": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), Separable(c)),
    "EdgeNeXt": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), Transposed(c, 4)),
    "MaxViT": lambda c, h, w: nn.Sequential(nn.Conv2d(c, c, 1), Grid(c, 4, 2)),
}
