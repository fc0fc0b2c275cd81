"""Networks that the scripts share, in a module of their own as the repositories have them."""

import torch
from torch import nn


def classifier(classes=5, channels=8):
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * channels, classes),
    )


def double(inputs, outputs):
    layers = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)
    return nn.Sequential(*layers, nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU(inplace=True))


class UNet(nn.Module):
    def __init__(self, inputs=3, outputs=2, channels=4):
        super().__init__()
        self.enter, self.down = double(inputs, channels), double(channels, 2 * channels)
        self.up = nn.ConvTranspose2d(2 * channels, channels, 2, stride=2)
        self.leave = nn.Sequential(double(2 * channels, channels), nn.Conv2d(channels, outputs, 1))

    def forward(self, x):
        fine = self.enter(x)
        return self.leave(torch.cat([fine, self.up(self.down(nn.functional.max_pool2d(fine, 2)))], 1))


class SuperResolution(nn.Module):
    def __init__(self, factor=2):
        super().__init__()
        self.relu = nn.ReLU()
        self.first, self.second = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, 8, 3, padding=1)
        self.third, self.shuffle = nn.Conv2d(8, factor**2, 3, padding=1), nn.PixelShuffle(factor)
        for layer in (self.first, self.second, self.third):
            nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("relu"))

    def forward(self, x):
        return self.shuffle(self.third(self.relu(self.second(self.relu(self.first(x))))))


class Detector(nn.Module):
    """Keeps what it has computed in attributes, as detection heads do: grids, strides and the last outputs."""

    def __init__(self, outputs=6):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.SiLU()
        self.deep, self.heads = nn.Conv2d(8, 16, 3, 2, 1), nn.ModuleList(nn.Conv2d(c, outputs, 1) for c in (8, 16))
        self.shape, self.strides, self.anchors, self.outputs = None, torch.empty(0), torch.empty(0), []
        self.register_buffer("stride", torch.tensor([2.0, 4.0]), persistent=False)

    def forward(self, x):
        fine = self.act(self.norm(self.conv(x)) if hasattr(self, "norm") else self.conv(x))
        self.outputs = [head(y) for head, y in zip(self.heads, (fine, self.act(self.deep(fine))), strict=True)]
        if self.shape != x.shape:
            self.shape, self.anchors = x.shape, self.grid().transpose(0, 1)
            self.strides = torch.cat([s.expand(y.shape[2] * y.shape[3], 1) for s, y in self.scales()]).transpose(0, 1)
        outputs, self.outputs = self.outputs, [y.detach() for y in self.outputs]
        if self.training:
            return outputs
        boxes = torch.cat([y.view(y.shape[0], y.shape[1], -1) for y in outputs], 2)
        return torch.cat(((self.anchors + boxes[:, :2].sigmoid()) * self.strides, boxes[:, 2:].sigmoid()), 1)

    def scales(self):
        return zip(self.stride, self.outputs, strict=True)

    def grid(self):
        points = []
        for _, y in self.scales():
            rows, columns = (torch.arange(n, device=y.device, dtype=y.dtype) + 0.5 for n in y.shape[2:])
            points.append(torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).view(-1, 2))
        return torch.cat(points)
