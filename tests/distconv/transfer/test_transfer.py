"""Every kind of transfer: what it fetches, and the adjoint identity <Fx, y> = <x, F*y> over all ranks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import distconv
from distconv.tensors.layouts import local_shape, owners
from distconv.transfer.exchange import exchange
from distconv.transfer.local_part import local_as
from distconv.transfer.needs import window
from distconv.transfer.redistribution import redistribution
from distconv.transfer.reshuffle import make_reshuffle
from distconv.transfer.route import Transfer

SHAPE = (2, 3, 7, 5)
ROWS, COLUMNS, FLAT = (Shard(2), Replicate()), (Shard(3), Replicate()), (Shard(1), Replicate())


def halo(mesh: DeviceMesh) -> tuple[Transfer, tuple[int, ...]]:
    owned = owners(mesh, (0,), SHAPE[2])
    needs = tuple(window((a - 1, b + 2), SHAPE[2]) for a, b in owned)
    start, stop = owned[mesh.get_local_rank(0)]
    return exchange(mesh, 0, 2, owned, needs), (*SHAPE[:2], stop - start + 3, SHAPE[3])


def rows_to_columns(mesh: DeviceMesh) -> tuple[Transfer, tuple[int, ...]]:
    return redistribution(mesh, ROWS, mesh, COLUMNS, SHAPE), local_shape(mesh, COLUMNS, SHAPE)


def rows_to_features(mesh: DeviceMesh) -> tuple[Transfer, tuple[int, ...]]:
    flat = (SHAPE[0], 3 * 7 * 5)
    return make_reshuffle(mesh, (ROWS, SHAPE), (FLAT, flat)), local_shape(mesh, FLAT, flat)


TRANSFERS = (halo, rows_to_columns, rows_to_features)


def gaps() -> dict[str, float]:
    """{transfer: <Fx, y> - <x, F*y>, summed over the ranks}."""
    mesh = distconv.init(f"height={dist.get_world_size()},width=1", device_type="cpu")
    x = local_as(torch.randn(SHAPE, dtype=torch.float64), mesh, ROWS)
    found = {}
    for make in TRANSFERS:
        transfer, needed = make(mesh)
        generator = torch.Generator().manual_seed(dist.get_rank())
        y = torch.randn(needed, generator=generator, dtype=torch.float64)
        fetched = transfer.fetch(x).reshape(needed)
        sides = torch.stack([(fetched * y).sum(), (x * transfer.adjoint(y).reshape(x.shape)).sum()])
        dist.all_reduce(sides)
        assert float(sides[0])
        found[make.__name__] = float(sides[0] - sides[1])
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_adjoints(ranks: Callable[[int], Ranks], size: int) -> None:
    for found in ranks(size).run(gaps):
        assert {name: gap for name, gap in found.items() if not abs(gap) < 1e-12} == {}
