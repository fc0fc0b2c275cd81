"""Models that are called in processes which a rank forks, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import distconv
from distconv.job.data import loading

pytestmark = pytest.mark.gloo


class InWorkers(Dataset):
    """Calls, trains and reads models where a DataLoader asks for an item."""

    def __init__(self, blur: nn.Module, wide: nn.Module) -> None:
        self.blur, self.wide = blur, wide
        self.optimizer = torch.optim.SGD(blur.parameters(), 0.1)

    def __len__(self) -> int:
        return 4

    def __getitem__(self, item: int) -> Any:
        x = torch.arange(192.0, dtype=torch.float64).view(1, 3, 8, 8) / 192
        if item == 0:
            return self.blur(x).detach()
        if item == 1:
            self.blur(x).square().mean().backward()
            self.optimizer.step()
            return self.blur(x).detach()
        if item == 2:
            return torch.cat(list(DataLoader(torch.arange(6.0), 2)))
        try:
            return self.wide(x).detach() if isinstance(self.wide, nn.Sequential) else self.wide.weight.sum().detach()
        except RuntimeError as error:
            return str(error)


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    blur = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(3, 3, 3, groups=3, bias=False))
    return blur.double(), nn.Sequential(nn.Conv2d(3, 256, 1), nn.Conv2d(256, 256, 3, padding=1)).double()


def read(blur: nn.Module, wide: nn.Module) -> list[Any]:
    return [item for loaded in (wide, wide[1]) for item in DataLoader(InWorkers(blur, loaded), None, num_workers=1)]


def compared(partition: str) -> tuple[list[Any], list[Any], bool]:
    """What workers find on ranks and in one process; whether the wide model has a sharded weight."""
    torch.manual_seed(1)
    expected = read(*models())
    mesh = distconv.init(partition, device_type="cpu")
    with distconv.distributed_script(mesh), loading(mesh):
        blur, wide = models()
        whole = copy.deepcopy(blur)
        wide(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
        blur(torch.randn(2, 3, 8, 8, dtype=torch.float64)).sum().backward()
        torch.manual_seed(1)
        found = read(whole, wide)
        return found, expected, type(wide[1].weight.data) is not Tensor


@pytest.mark.parametrize("partition", ["height=2", "channel=2"])
def test_workers_of_a_loader_call_models_whole(ranks: Callable[[int], Ranks], partition: str) -> None:
    for found, expected, is_sharded in ranks(2).run(compared, partition):
        assert is_sharded == (partition == "channel=2")
        for item, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
            if item % 4 == 3 and is_sharded:
                assert "a sharded tensor in a process that a rank has forked" in ours and "\n" not in ours
            else:
                torch.testing.assert_close(ours, theirs)
