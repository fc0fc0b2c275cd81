from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Ranks, missing_for_mpi


@pytest.fixture(scope="session", params=["gloo", "mpi"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Callable[[int], Ranks]]:
    """ranks(size).run(function, *args) runs a function on `size` processes, over Gloo and then over MPI."""
    if request.param == "mpi" and (reason := missing_for_mpi()):
        pytest.skip(reason)
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in pools:
            pools[size] = Ranks(size, request.param)
        return pools[size]

    yield pool
    for started in pools.values():
        started.close()
