"""Takes a few steps of a convolution that pays to divide, then prints what this rank decided and the times it knows."""

import torch

import mucudnn

x = torch.randn(8, 4, 24, 24)
convolution = torch.nn.Conv2d(4, 4, 15, padding=7)
for _ in range(2):
    convolution(x).square().mean().backward()
for record in mucudnn.report():
    print(record.direction, record.division, record.seconds, record.stock_seconds)
