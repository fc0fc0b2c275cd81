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


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked `gloo` run over Gloo alone: rules do not know what carries messages, and transfers run over both.
    Those over MPI are marked `mpi`, and those of compiled models `compile`.
    """
    for item in items:
        of = getattr(item, "callspec", None)
        if of is not None and of.params.get("ranks") == "mpi":
            item.add_marker("mpi")
        if item.path.parent.name == "compiled":
            item.add_marker("compile")

    def wanted(item: pytest.Item) -> bool:
        return not (item.get_closest_marker("mpi") and item.get_closest_marker("gloo"))

    left_out = [item for item in items if not wanted(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if wanted(item)]
