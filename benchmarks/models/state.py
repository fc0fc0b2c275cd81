"""Models that change their own parameters and buffers while they compute, written as their papers' public code is."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models.entry import Entry

STEPS = 3
"""Of training: what a call has changed counts for the next."""


class MaskedConv2d(nn.Conv2d):
    """A convolution of the pixels before each one (van den Oord et al., "Pixel Recurrent Neural Networks", 2016)."""

    mask: Tensor

    def __init__(self, inputs: int, outputs: int, kernel: int, sees_itself: bool) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        mask = torch.ones_like(self.weight)
        mask[:, :, kernel // 2, kernel // 2 + sees_itself :] = 0
        mask[:, :, kernel // 2 + 1 :] = 0
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data *= self.mask
        return super().forward(x)


def pixel_cnn() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, sees_itself in ((3, False), (16, True), (16, True)):
        layers += [MaskedConv2d(inputs, 16, 5, sees_itself), nn.BatchNorm2d(16), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(16, 8, 1))


class NormedConv2d(nn.Conv2d):
    """A convolution whose filters' norms are limited, as in EEGNet (Lawhern et al., 2018)."""

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=1.0)
        return super().forward(x)


class NormedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.25)
        return super().forward(x)


def eeg_net() -> nn.Module:
    """For 16 electrodes and 128 points of time."""
    time = [nn.Conv2d(1, 4, (1, 32), padding=(0, 16), bias=False), nn.BatchNorm2d(4)]
    electrodes = [NormedConv2d(4, 8, (16, 1), groups=4, bias=False), nn.BatchNorm2d(8), nn.ELU(), nn.AvgPool2d((1, 4))]
    apart = [nn.Conv2d(8, 8, (1, 16), padding=(0, 8), groups=8, bias=False), nn.Conv2d(8, 8, 1, bias=False)]
    end = [nn.BatchNorm2d(8), nn.ELU(), nn.AvgPool2d((1, 8)), nn.Flatten(), NormedLinear(32, 4)]
    return nn.Sequential(*time, *electrodes, *apart, *end)


class BinaryConv2d(nn.Conv2d):
    """Computes with the signs of its weights (Courbariaux et al., "Binarized Neural Networks", 2016).

    The weights that are trained are an attribute of the parameter, which has them again when the optimizer steps.
    """

    def forward(self, x: Tensor) -> Tensor:
        weight: Any = self.weight
        if hasattr(weight, "org"):
            weight.org.copy_(weight.data.clamp_(-1, 1))
        else:
            weight.org = weight.data.clone()
            weight.register_post_accumulate_grad_hook(_with_trained)
        weight.data = weight.org.sign()
        return super().forward(x)


def _with_trained(weight: Any) -> None:
    weight.data.copy_(weight.org)


def binary_net() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 16), (16, 32)):
        layers += [BinaryConv2d(inputs, outputs, 3, padding=1), nn.MaxPool2d(2), nn.BatchNorm2d(outputs)]
        layers.append(nn.Hardtanh(inplace=True))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def _clip(module: nn.Module, _: Any) -> None:
    for parameter in module.parameters(recurse=False):
        parameter.data.clamp_(-0.05, 0.05)


def critic() -> nn.Module:
    """That of a Wasserstein GAN whose weights are clipped (Arjovsky et al., 2017), by a hook of each layer."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        convolution = nn.Conv2d(inputs, outputs, 4, 2, 1)
        convolution.register_forward_pre_hook(_clip)
        layers += [convolution, nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(32, 1, 8))


def encoder(features: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32)):
        layers += [nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, features))


class MoCo(nn.Module):
    """Momentum contrast (He et al., 2020): a slow twin encodes the keys, and a queue keeps those of earlier batches."""

    queue: Tensor
    place: Tensor

    def __init__(self, features: int = 8, length: int = 16) -> None:
        super().__init__()
        self.fast, self.slow = encoder(features), encoder(features)
        for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
            slow.data.copy_(fast.data)
            slow.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(features, length), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        queries = F.normalize(self.fast(x), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            keys = F.normalize(self.slow(other), dim=1)
        near = torch.einsum("nc,nc->n", [queries, keys]).unsqueeze(-1)
        far = torch.einsum("nc,ck->nk", [queries, self.queue.clone().detach()])
        self._keep(keys)
        return torch.cat((near, far), dim=1) / 0.2

    @torch.no_grad()
    def _keep(self, keys: Tensor) -> None:
        place, count = int(self.place), keys.shape[0]
        self.queue[:, place : place + count] = keys.T
        self.place[0] = (place + count) % self.queue.shape[1]


class Byol(nn.Module):
    """Bootstrap your own latent (Grill et al., 2020): one network predicts what its slow twin makes of another view."""

    def __init__(self, features: int = 8) -> None:
        super().__init__()
        self.online, self.target = encoder(features), encoder(features)
        self.target.load_state_dict(self.online.state_dict())
        self.target.requires_grad_(False)
        hidden = [nn.Linear(features, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True)]
        self.predictor = nn.Sequential(*hidden, nn.Linear(16, features))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            targets = F.normalize(self.target(other), dim=-1), F.normalize(self.target(x), dim=-1)
        found = (F.normalize(self.predictor(self.online(view)), dim=-1) for view in (x, other))
        first, second = (2 - 2 * (own * target).sum(-1) for own, target in zip(found, targets, strict=True))
        return first + second


def entries() -> dict[str, Entry]:
    image = (4, 3, 32, 32)
    return {
        "state.PixelCNN": Entry(pixel_cnn, (image,), STEPS),
        "state.EEGNet": Entry(eeg_net, ((4, 1, 16, 128),), STEPS),
        "state.BinaryNet": Entry(binary_net, (image,), STEPS),
        "state.WGAN": Entry(critic, ((4, 3, 64, 64),), STEPS),
        "state.MoCo": Entry(MoCo, (image, image), STEPS),
        "state.BYOL": Entry(Byol, (image, image), STEPS),
    }
