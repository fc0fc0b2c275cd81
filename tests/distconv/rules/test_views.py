"""Views of maps whose dims look alike: each view's gradient lies as that view's own input lay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from ranks import Ranks
from torch import Tensor
from torch.distributed.tensor import Shard

import distconv
from distconv.rules.views import dim_groups, view_layout

pytestmark = pytest.mark.gloo


def both_flattened(x: Tensor) -> Tensor:
    """One map flattened twice, once transposed: after the views nothing tells the two apart."""
    return torch.cat([(x * 1).flatten(1), (x * 2).transpose(2, 3).flatten(1)], 1)


def flattened_again_without_grad(x: Tensor) -> Tensor:
    y = (x * 1).flatten(1)
    with torch.no_grad():
        (x * 2).transpose(2, 3).flatten(1)
    return y


def transposed_again_without_grad(x: Tensor) -> Tensor:
    y = (x * 2).transpose(2, 3).flatten(1)
    with torch.no_grad():
        (x * 1).flatten(1)
    return y


def leaf_flattened(x: Tensor) -> Tensor:
    """The view of a tensor that no operator has made, and another view of it before."""
    x.transpose(2, 3).flatten(1)
    return x.flatten(1)


def flattened_in_turn(x: Tensor) -> Tensor:
    """Dims that merge in two steps."""
    return (x * 3).transpose(2, 3).flatten(2).square().flatten(1) + (x * 1).flatten(2).flatten(1)


def windows(x: Tensor) -> Tensor:
    """Windows of 2x2 as attention within them partitions a map, and the map again."""
    n, c, h, w = x.shape
    parts = x.permute(0, 2, 3, 1).view(n, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)
    scores = parts @ parts.transpose(1, 2)
    scores = scores.view(n, -1, 4, 4) + torch.arange(4, dtype=x.dtype).view(1, -1, 1, 1)
    back = (scores.view(-1, 4, 4) @ parts).view(n, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(n, h, w, c)
    return back.permute(0, 3, 1, 2) + x


VIEWS = (
    both_flattened,
    flattened_again_without_grad,
    transposed_again_without_grad,
    leaf_flattened,
    flattened_in_turn,
    windows,
)


def compare(partition: str) -> dict[str, float]:
    """{view: the largest error of its output or its gradient against one process}."""
    mesh = distconv.init(partition, device_type="cpu")
    values = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    errors = {}
    for view in VIEWS:
        alone, here = values.clone().requires_grad_(), values.clone().requires_grad_()
        expected = view(alone)
        found = view(distconv.shard(here, mesh))
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (distconv.gather(found) * weights).sum().backward()
        pairs = (distconv.gather(found), expected), (here.grad, alone.grad)
        errors[view.__name__] = max(float((a - b).detach().abs().max()) for a, b in pairs)  # type: ignore[operator, union-attr]
    return errors


@pytest.mark.parametrize(
    "size, partition", [(2, "height=2"), (2, "width=2"), (4, "sample=2,height=2"), (4, "height=2,width=2")]
)
def test_views_of_square_maps(ranks: Callable[[int], Ranks], size: int, partition: str) -> None:
    for rank, errors in enumerate(ranks(size).run(compare, partition)):
        assert {name: error for name, error in errors.items() if not error < 1e-11} == {}, f"rank {rank}"


def layouts_of_divided_rows() -> list[int]:
    """The dims that `height=2` shards of views of 8x6 positions in shards of rows."""
    mesh = distconv.init("height=2", device_type="cpu")
    views = (
        ((2, 48, 3), 1, (2, 2, 4, 2, 3, 3)),  # tokens as windows
        ((2, 48, 3), 1, (2, 8, 6, 3)),  # tokens as a picture, channels last
        ((2, 3, 48), 2, (2, 3, 8, 6)),
        ((2, 144), 1, (2, 3, 8, 6)),  # features of a linear layer, of which convolutions follow
    )
    found = [view_layout(mesh, ((Shard(dim),), before), after, None) for before, dim, after in views]
    return [placement.dim for (placement,) in found]  # type: ignore[attr-defined]


def test_rows_stay_where_they_are_in_tokens_and_windows(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).run(layouts_of_divided_rows) == [[1, 1, 2, 2]] * 2


def leaf_gradient() -> tuple[bool, float]:
    """Of a sharded leaf: whether its gradient lies as it does, and how far it is from that of one process."""
    mesh = distconv.init("width=2", device_type="cpu")
    values = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    leaf = distconv.shard(values, mesh).detach().transpose(2, 3).requires_grad_()
    alone = values.transpose(2, 3).requires_grad_()
    leaf.flatten(1).square().sum().backward()
    alone.flatten(1).square().sum().backward()
    assert leaf.grad is not None and alone.grad is not None
    return leaf.grad.placements == leaf.placements, float((distconv.gather(leaf.grad) - alone.grad).abs().max())


def test_the_gradient_of_a_leaf_lies_as_the_leaf(ranks: Callable[[int], Ranks]) -> None:
    for alike, error in ranks(2).run(leaf_gradient):
        assert alike and error < 1e-11


def strides_behind_a_view() -> bool:
    """Whether a convolution of a channels-last view, of which each rank has one sample, has one process's strides."""
    mesh, x, weight = distconv.init("sample=2", device_type="cpu"), torch.randn(2, 4, 6, 1, 5), torch.randn(3, 5, 3, 3)
    strides = []
    for given in (x, distconv.shard(x, mesh)):
        y = torch.conv2d(given.permute(0, 4, 1, 2, 3).reshape(2, 5, 4, 6), weight)
        strides.append(y.stride())
    return strides[0] == strides[1] and strides[0][1] == 1


def test_a_view_of_one_sample_keeps_the_format(ranks: Callable[[int], Ranks]) -> None:
    assert all(ranks(2).run(strides_behind_a_view))


@pytest.mark.parametrize(
    "before, after, groups",
    [
        ((2, 3, 4, 5), (2, 60), [((0,), (0,)), ((1, 2, 3), (1,))]),
        ((2, 60), (2, 3, 4, 5), [((0,), (0,)), ((1,), (1, 2, 3))]),
        ((2, 6, 4), (2, 2, 3, 4), [((0,), (0,)), ((1,), (1, 2)), ((2,), (3,))]),
        ((4, 6), (6, 4), [((0, 1), (0, 1))]),
        ((2, 1, 3), (2, 3), [((0,), (0,)), ((1, 2), (1,))]),
        ((2, 3), (2, 3, 1), [((0,), (0,)), ((1,), (1,)), ((), (2,))]),
    ],
)
def test_dim_groups(
    before: tuple[int, ...], after: tuple[int, ...], groups: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> None:
    assert list(dim_groups(before, after)) == groups
