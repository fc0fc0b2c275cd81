"""What GradScaler asks of gradients: each is unscaled, and all ranks agree on whether one is not finite."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import Tensor

import distconv

pytestmark = pytest.mark.gloo


def unscaled(bad: int | None, plain_first: bool) -> tuple[float, list[Tensor]]:
    """Gradients of two meshes, sharded and plain, times a half; the one numbered ``bad`` ends in inf."""
    channels, space = (distconv.init(text, device_type="cpu") for text in ("channel=2,sample=2", "height=4"))
    whole = [torch.arange(1.0, 1 + 8 * 8).view(1, 8, 8, 1) for _ in range(4)]
    if bad is not None:
        whole[bad].view(-1)[-1] = float("inf")
    gradients = [
        whole[0],
        *(distconv.shard(x, mesh) for x, mesh in zip(whole[1:], (channels, space, channels), strict=True)),
    ]
    # Torch looks at the layout of the first gradient alone; without elements this one has no sharded dim.
    first = torch.empty(0) if plain_first else distconv.shard(torch.empty(0), channels)
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_([first, *gradients], found, torch.tensor(0.5))
    return found.item(), [distconv.gather(each) for each in gradients]


@pytest.mark.parametrize("plain_first", [True, False])
@pytest.mark.parametrize("bad", [None, 0, 1, 2, 3])
def test_every_rank_finds_what_one_shard_holds(
    ranks: Callable[[int], Ranks], bad: int | None, plain_first: bool
) -> None:
    expected = torch.arange(1.0, 1 + 8 * 8).view(1, 8, 8, 1) * 0.5
    for found, gradients in ranks(4).run(unscaled, bad, plain_first):
        assert found == (bad is not None)
        for number, gradient in enumerate(gradients):
            finite = gradient.flatten()[:-1] if number == bad else gradient.flatten()
            assert torch.equal(finite, expected.flatten()[: len(finite)])
