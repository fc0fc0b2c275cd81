"""Detection models take images of their own sizes in a list."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

import distconv
from distconv.model.parallelize import distributed_script


class Detector(nn.Module):
    """Images in a list, batched within; features of two resolutions; boxes of the positions that score best."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = Backbone()
        self.head = nn.Linear(4, 5)

    def forward(self, images: list[Tensor], targets: list[Tensor]) -> Tensor:
        batch = images[0].new_zeros(len(images), 3, 16, 16)
        for index, image in enumerate(images):
            batch[index, :, : image.shape[1], : image.shape[2]].copy_(image - image.mean((1, 2), keepdim=True))
        fine, coarse = self.backbone(batch).values()
        features = torch.cat([fine.flatten(2), coarse.flatten(2)], 2).mT
        found = self.head(features)
        best = found[..., 0].topk(3).indices
        picked = found.gather(1, best[..., None].expand(-1, -1, 5))[..., 1:]
        return sum((boxes[None] - one[:, None]).abs().mean() for boxes, one in zip(targets, picked, strict=True))


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = torch.relu(self.first(x))
        return {"fine": fine, "coarse": torch.relu(self.second(fine))}


def data() -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(3, 16, 12), (3, 10, 16)]
    return [torch.rand(shape, generator=generator).double() for shape in shapes], [
        torch.rand(2, 4, generator=generator).double() for _ in shapes
    ]


def refused(partition: str) -> str:
    mesh = distconv.init(partition, device_type="cpu")
    with pytest.raises(ValueError) as caught, distributed_script(mesh):
        Detector().double()(*data())
    return str(caught.value)


@pytest.mark.parametrize("partition", ["sample=2,height=2", "sample=4", "channel=4"])
def test_a_script_is_shown_what_to_do(ranks: Callable[[int], Ranks], partition: str) -> None:
    for line in ranks(4).run(refused, partition):
        assert line.startswith("input 1 of Detector.forward is a list of 2 tensors of 3 dims, such as (3, 16, 12)")
        assert "distconv.parallelize(model.backbone, mesh).register_forward_hook(" in line and "\n" not in line


def with_a_parallel_backbone(partition: str) -> float:
    """The largest difference in loss and gradients from one process, done as the line says."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(1)
    plain = Detector().double()
    model = copy.deepcopy(plain)
    distconv.parallelize(model.backbone, mesh).register_forward_hook(
        lambda module, x, y: tree_map_only(DTensor, distconv.gather, y)
    )
    images, targets = data()
    expected, found = plain(images, targets), model(images, targets)
    expected.backward()
    found.backward()
    differences = [found - expected]
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        assert a.grad is not None and b.grad is not None
        differences.append(distconv.gather(a.grad) - b.grad)
    return max(float(difference.detach().abs().max()) for difference in differences)


@pytest.mark.parametrize("partition", ["sample=2,height=2", "sample=2,channel=2"])
def test_its_backbone_runs_on_shards(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert max(ranks(4).run(with_a_parallel_backbone, partition)) < 1e-12


class Boxes(nn.Module):
    """A batch of pictures and their boxes in one list; a box that is -1 is none, as in common versions of RetinaNet."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 5, 3, stride=2, padding=1)

    def forward(self, given: list[Tensor]) -> Tensor:
        pictures, boxes = given
        found = self.head(torch.relu(self.backbone(pictures))).permute(0, 2, 3, 1).flatten(1, 2)
        losses = []
        for guesses, targets in zip(found, boxes, strict=True):
            real = targets[targets[:, 4] != -1]
            distance, nearest = (guesses[:, None] - real).abs().sum(2).min(1)
            losses.append((guesses - real[nearest])[distance < distance.mean()].pow(2).mean())
        return torch.stack(losses).mean()


def of_boxes() -> tuple[Boxes, list[Tensor]]:
    torch.manual_seed(3)
    boxes = torch.rand(2, 3, 5, dtype=torch.float64)
    boxes[1, 2] = -1
    return Boxes().double(), [torch.rand(2, 3, 12, 16, dtype=torch.float64), boxes]


def step(model: nn.Module, given: list[Tensor]) -> list[Tensor]:
    loss = model(given)
    loss.backward()
    return [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None)]


def boxes_on_ranks(partition: str) -> list[Tensor]:
    model, given = of_boxes()
    with distributed_script(distconv.init(partition, device_type="cpu")):
        return [distconv.gather(x) for x in step(model, given)]


@pytest.mark.parametrize("partition", ["sample=2,height=2", "height=2,channel=2"])
def test_a_batch_beside_its_boxes_is_partitioned(ranks: Callable[[int], Ranks], partition: str) -> None:
    expected = step(*of_boxes())
    for found in ranks(4).run(boxes_on_ranks, partition):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("partition", ["height=3", "sample=2,height=2"])
def test_a_batch_beside_its_boxes_is_computed_in_parts(partition: str, capfd: pytest.CaptureFixture[str]) -> None:
    model, given = of_boxes()
    expected = step(copy.deepcopy(model), given)
    found = step(distconv.in_turn(model, partition), given)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    assert "runs whole" not in capfd.readouterr().err
