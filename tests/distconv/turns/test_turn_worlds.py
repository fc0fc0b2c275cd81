"""Parts in turn in a program that has process groups of its own."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
from torch import nn

import distconv


def test_parts_keep_their_groups_when_a_program_destroys_its_own() -> None:
    plain, x = nn.Conv2d(2, 3, 3, padding=1).double(), torch.randn(2, 2, 8, 8, dtype=torch.float64)
    turned = distconv.in_turn(copy.deepcopy(plain), "height=2,width=2")
    right = plain(x)
    torch.testing.assert_close(turned(x), right)
    for _ in range(2):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            dist.new_group([0])
            torch.testing.assert_close(turned(x), right)
        finally:
            dist.destroy_process_group()
        torch.testing.assert_close(turned(x), right)
