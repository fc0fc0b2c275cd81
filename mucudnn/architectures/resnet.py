from __future__ import annotations

from torch import Tensor, nn


def _convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, residual: nn.Module) -> None:
        super().__init__()
        self.residual = residual
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.residual(x) + self.shortcut(x))


def _basic(inputs: int, width: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(_convolution(inputs, width, 3, stride), nn.ReLU(inplace=True), _convolution(width, outputs, 3))


def _bottleneck(inputs: int, width: int, outputs: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        _convolution(inputs, width, 1),
        nn.ReLU(inplace=True),
        _convolution(width, width, 3, stride),
        nn.ReLU(inplace=True),
        _convolution(width, outputs, 1),
    )


_KINDS = {18: (_basic, (2, 2, 2, 2)), 34: (_basic, (3, 4, 6, 3)), 50: (_bottleneck, (3, 4, 6, 3))}


class ResNet(nn.Module):
    """ResNet-18, -34 or -50 (He et al., arXiv:1512.03385, 2015) with the stride in the 3x3 convolution.

    Takes (N, 3, H, W), gives (N, classes).

    width: channels of the first convolution.
    width_factor: widens the 3x3 convolutions of every block (Zagoruyko and Komodakis, arXiv:1605.07146, 2016);
        depth 50 with factor 2 is WRN-50-2-bottleneck.

    Raises ValueError for another depth.
    """

    def __init__(self, depth: int = 18, classes: int = 1000, width: int = 64, width_factor: int = 1) -> None:
        super().__init__()
        if depth not in _KINDS:
            raise ValueError(f"depth of a ResNet: {depth}, not one of {', '.join(map(str, _KINDS))}")
        residual, repeats = _KINDS[depth]
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        )
        channels = width
        stages: list[nn.Module] = []
        for stage, count in enumerate(repeats):
            inner = width * 2**stage * width_factor
            outputs = inner if residual is _basic else 4 * width * 2**stage
            for index in range(count):
                stride = 2 if index == 0 and stage > 0 else 1
                stages.append(_Block(channels, outputs, stride, residual(channels, inner, outputs, stride)))
                channels = outputs
        self.stages = nn.Sequential(*stages)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.stages(self.stem(x))).flatten(1))
