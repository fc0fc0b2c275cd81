"""A network whose convolutions are well known."""

from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.same = nn.Conv2d(8, 8, 3, padding="same")
        self.again = nn.Conv2d(8, 8, 3, padding=1)
        self.grouped = nn.Conv2d(8, 8, 3, padding=1, groups=4, padding_mode="circular")

    def forward(self, x):
        return self.grouped(self.again(self.same(x)))


def small():
    first = nn.Conv2d(3, 8, 5, stride=2)
    frozen = nn.ConvTranspose2d(8, 2, 3, stride=2, output_padding=1).requires_grad_(False)
    return nn.Sequential(first, nn.ReLU(), Block(), frozen)


NOTHING = 3
