from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Ranks
from reference import errors
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import distconv
from distconv.model import homes
from distconv.model.homes import buckets
from distconv.transfer import group_calls


class Block(nn.Module):
    """A tensor into two convolutions, a 1x1 shortcut, an in-place ReLU, weights used twice, a recomputed branch."""

    def __init__(self, recompute: bool = True) -> None:
        super().__init__()
        self.wide = nn.Conv2d(3, 3, 5, padding=2)
        self.narrow = nn.Conv2d(3, 3, 3, padding=1)
        self.shortcut = nn.Conv2d(3, 3, 1, stride=2, bias=False)
        self.down = nn.Conv2d(3, 3, 3, stride=2, padding=1)
        self.scale = nn.Parameter(torch.rand(3, 1, 1))
        self.unused = nn.Parameter(torch.rand(3))
        self.frozen = nn.Conv2d(3, 3, 3, padding=1).requires_grad_(False)
        self.recompute = recompute

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.relu(self.wide(x) + self.narrow(x), inplace=True) * self.scale
        y = self.narrow(self.frozen(y))
        if self.recompute:
            y = checkpoint(self.wide, y, use_reentrant=False)
        return self.down(y) + self.shortcut(x)


class Positional(nn.Module):
    """A parameter as large as the activations: its gradient comes in shards."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.rand(1, 3, 7, 6))
        self.convolution = nn.Conv2d(3, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x + self.position)


@pytest.mark.parametrize(
    "size, partition", [(1, "height=1"), (2, "height=2"), (3, "width=3"), (4, "sample=2,height=2")]
)
@pytest.mark.parametrize("kind", [Block, Positional])
def test_modules_equal_one_process(ranks: Callable[[int], Ranks], size: int, partition: str, kind: Any) -> None:
    for found in ranks(size).run(errors, kind, [(2, 3, 7, 6)], partition):
        assert max(found.values()) < 1e-12, found


def train(partition: str, mode: str) -> dict[str, Any]:
    """Three Adam steps with clipping and accumulation over two micro-batches, distributed and alone."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(3)
    plain = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 1, 3, stride=2)).double()
    model = copy.deepcopy(plain)
    batches = [[torch.randn(4, 2, 9, 8, dtype=torch.float64) for _ in range(2)] for _ in range(3)]

    def steps(net: nn.Module) -> list[float]:
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        losses = []
        for batch in batches:
            optimizer.zero_grad()
            for x in batch:
                y = net(x)
                loss = distconv.gather((y * y).sum() / y.numel())
                loss.backward()
            losses.append(loss.item())
            losses.append(float(nn.utils.clip_grad_norm_(net.parameters(), 0.1)))
            optimizer.step()
            schedule.step()
        assert all(type(p) is nn.Parameter and type(p.grad) is Tensor for p in net.parameters())
        return losses

    expected = steps(plain)
    if mode == "script":
        with distconv.distributed_script(mesh):
            found = steps(model)
    else:
        found = steps(distconv.parallelize(model, mesh))
    gap = max(
        float((a - b).abs().max())
        for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True)
    )
    return {"losses": (found, expected), "gap": gap, "keys": list(model.state_dict()) == list(plain.state_dict())}


@pytest.mark.parametrize("mode", ["script", "program"])
@pytest.mark.parametrize("size, partition", [(2, "height=2"), (4, "sample=2,width=2")])
def test_training_equals_one_process(ranks: Callable[[int], Ranks], size: int, partition: str, mode: str) -> None:
    for answer in ranks(size).run(train, partition, mode):
        found, expected = answer["losses"]
        assert found == pytest.approx(expected, rel=1e-11)
        assert answer["gap"] < 1e-11 and answer["keys"]


def allreduces(partition: str) -> tuple[list[int], list[str]]:
    """Elements of every allreduce of a backward pass, and the order of events in it."""
    mesh = distconv.init(partition, device_type="cpu")
    model = distconv.parallelize(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(6))), mesh)
    x = distconv.shard(torch.randn(2, 4, 8, 8), mesh)
    sizes: list[int] = []
    events: list[str] = []
    transport = group_calls.all_reduce

    def counting(tensor: Tensor, *rest: Any, **options: Any) -> Any:
        sizes.append(tensor.numel())
        events.append("allreduce")
        return transport(tensor, *rest, **options)

    limits = homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES
    homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES = 148 * 4, 148 * 8  # one layer, then two
    group_calls.all_reduce = counting
    try:
        y = x
        for index, layer in enumerate(model):

            def watch(_: Any, __: Any, out: Tensor, index: int = index) -> None:
                out.register_hook(lambda _: events.append(f"layer {index}"))

            layer.register_forward_hook(watch)
        y = model(x)
        y.redistribute(placements=y.placements).to_local().sum().backward()
    finally:
        group_calls.all_reduce = transport
        homes.FIRST_BUCKET_BYTES, homes.BUCKET_BYTES = limits
    return sizes, events


def test_gradients_move_in_buckets_during_backward(ranks: Callable[[int], Ranks]) -> None:
    layer = 4 * 4 * 9 + 4
    for sizes, events in ranks(4).run(allreduces, "sample=2,height=2"):
        assert sizes == [layer, 2 * layer, 2 * layer, layer]
        assert " ".join(events) == (
            "layer 5 allreduce layer 4 layer 3 allreduce layer 2 layer 1 allreduce layer 0 allreduce"
        )


def test_buckets_cut_by_size_and_dtype() -> None:
    tensors = [torch.empty(1 << 18), torch.empty(1 << 17, dtype=torch.float64), torch.empty(1 << 18), torch.empty(1)]
    assert [[t.numel() for t in bucket] for bucket in buckets(dict.fromkeys(tensors))] == [
        [1, 1 << 18],
        [1 << 17],
        [1 << 18],
    ]


def bucket_lists() -> list[list[int]]:
    """The parameters of each bucket, by their first extent, of which rank 0 holds more than the last rank."""
    mesh = distconv.init("channel=2", device_type="cpu")
    parameters = [distconv.shard(torch.zeros(extent, 1 << 17, 1, 1).transpose(0, 1), mesh) for extent in (1, 5, 3)]
    return [[parameter.shape[1] for parameter in bucket] for bucket in buckets(dict.fromkeys(parameters))]


def test_buckets_are_the_same_where_shards_are_uneven(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).run(bucket_lists)
    assert first == second == [[3], [5, 1]]


def shard_and_gather(partition: str) -> list[Any]:
    mesh = distconv.init(partition, device_type="cpu")
    x = torch.arange(2.0 * 3 * 5 * 7).view(2, 3, 5, 7).requires_grad_()
    sharded = distconv.shard(x, mesh)
    assert isinstance(sharded, DTensor) and sharded.shape == x.shape
    doubled = sharded * 2
    full = distconv.gather(doubled)
    full.backward(torch.ones_like(full))
    assert x.grad is not None
    return [torch.equal(full, 2 * x), bool((x.grad == 2).all()), sharded._local_tensor.numel(), type(full) is Tensor]


@pytest.mark.parametrize(
    "size, partition, elements",
    [(1, "sample=1", [210]), (4, "sample=2,height=2", [63, 42, 63, 42]), (4, "width=4", [60, 60, 60, 30])],
)
def test_shard_and_gather(ranks: Callable[[int], Ranks], size: int, partition: str, elements: list[int]) -> None:
    assert ranks(size).run(shard_and_gather, partition) == [[True, True, count, True] for count in elements]


def changed_in_place(partition: str) -> bool:
    mesh = distconv.init(partition)
    x = torch.ones(4, 2, 6, 6)
    distconv.shard(x, mesh).sub_(1)
    return bool((x == 1).all())


@pytest.mark.parametrize(("given", "shown"), [(3, "of type int"), (nn.ReLU, "the class ReLU")])
def test_what_is_no_module_is_no_model(given: Any, shown: str) -> None:
    mesh: Any = None  # the model is looked at first
    for call in (lambda: distconv.in_turn(given, "height=2"), lambda: distconv.parallelize(given, mesh)):
        with pytest.raises(TypeError, match=f"^model: {shown}; accepted: a torch.nn.Module$"):
            call()


def test_a_partition_is_no_mesh() -> None:
    given: Any = "height=2"
    for call in (lambda: distconv.shard(torch.ones(1, 1, 4), given), lambda: distconv.parallelize(nn.ReLU(), given)):
        with pytest.raises(TypeError, match=r"mesh 'height=2': accepted: the mesh that distconv\.init returns"):
            call()


@pytest.mark.parametrize("partition", ["sample=2", "height=2"])
def test_a_shard_shares_no_memory_with_the_whole(ranks: Callable[[int], Ranks], partition: str) -> None:
    assert all(ranks(2).run(changed_in_place, partition))


def without_parameters() -> list[bool]:
    """Whether a module without parameters that was parallelized is cut and right, and one that was not runs whole."""
    mesh, x, found = distconv.init("height=2"), torch.randn(2, 3, 8, 6, requires_grad=True), []
    alone = nn.AvgPool2d(5, 1, 2)
    for model in (alone, distconv.parallelize(nn.AvgPool2d(5, 1, 2), mesh)):
        y = model(x)
        (grad,) = torch.autograd.grad(y.square().sum(), x)
        whole = distconv.gather(y) if isinstance(y, DTensor) else y
        (expected,) = torch.autograd.grad(alone(x).square().sum(), x)
        found += [isinstance(y, DTensor), torch.allclose(whole, alone(x)), torch.allclose(grad, expected)]
    return found


def test_a_module_without_parameters_is_cut_where_it_is_parallelized(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(without_parameters) == [[False, True, True, True, True, True]] * 2


def another_partition() -> list[float]:
    return [max(errors(Block, [(2, 3, 7, 6)], partition).values()) for partition in ("height=2", "width=2", "height=2")]


def test_init_again_for_another_partition(ranks: Callable[[int], Ranks]) -> None:
    for found in ranks(2).run(another_partition):
        assert max(found) < 1e-12


class Remembering(nn.Module):
    """Convolves beside what the call before left in a list; counts calls in a dict, and lets the list grow once."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor, cache: list[Any], counts: dict[str, int]) -> Tensor:
        counts["calls"] = counts.get("calls", 0) + 1
        last = x if cache[0] is None else cache[0]
        cache[0] = x * 2
        if len(cache) == 1:
            cache.append("kept")
        return self.convolution(torch.cat([x, last], 1))


def remembered(partition: str) -> tuple[float, Any]:
    """The largest difference over three calls from those of one process, and what the caller's containers hold."""
    mesh = distconv.init(partition, device_type="cpu")
    torch.manual_seed(1)
    plain = Remembering().double()
    model = distconv.parallelize(copy.deepcopy(plain), mesh)
    caches, counts = ([None], [None]), ({}, {})
    largest = 0.0
    for _ in range(3):
        x = torch.randn(2, 2, 5, 4, dtype=torch.float64)
        expected = plain(x, caches[0], counts[0])
        y = distconv.gather(model(x, cache=caches[1], counts=counts[1]))
        largest = max(largest, float((y - expected).abs().max()))
    assert isinstance(caches[1][0], DTensor)
    return largest, (counts[1], caches[1][1])


@pytest.mark.parametrize("partition", ["height=2", "channel=2"])
def test_containers_that_a_model_changes_are_the_callers(ranks: Callable[[int], Ranks], partition: str) -> None:
    for largest, held in ranks(2).run(remembered, partition):
        assert largest < 1e-12
        assert held == ({"calls": 3}, "kept")
