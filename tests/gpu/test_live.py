"""Live planning on a GPU: results of every call while it explores, and the program never waits for a time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import mucudnn
from mucudnn.optimizer import OverheadBudget
from mucudnn.planning import search
from mucudnn.runtime import explored

LAYERS = {
    "2-D": (nn.Conv2d(6, 8, 3, padding=1), (6, 6, 17, 16)),
    "strided, grouped": (nn.Conv2d(6, 8, 3, stride=2, groups=2), (6, 6, 17, 16)),
    "transposed": (nn.ConvTranspose2d(6, 8, 3, stride=2, output_padding=1), (6, 6, 9, 8)),
    "3-D": (nn.Conv3d(4, 6, 3, padding=1), (4, 4, 8, 8, 8)),
}
STEPS = 60


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is granted and nothing is too short, so that small tensors are explored at once."""
    monkeypatch.setattr(OverheadBudget, "grants", lambda overhead, seconds, **named: True)
    monkeypatch.setattr(search, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(explored, "WORTH", 0)


@contextmanager
def without_waiting(device: torch.device) -> Iterator[None]:
    """On a GPU whatever of torch would wait for the device raises an error."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def gradients(layer: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of the parameters."""
    x = x.detach().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(torch.sin(torch.arange(y.numel(), dtype=y.dtype, device=y.device)).view(y.shape))
    found = [y, x.grad, *(parameter.grad for parameter in layer.parameters())]
    return [tensor.detach() for tensor in found if tensor is not None]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("name", LAYERS)
def test_every_call_gives_the_results_of_float64(name: str, device: torch.device) -> None:
    made, shape = LAYERS[name]
    layer = copy.deepcopy(made).to(device)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    expected = gradients(copy.deepcopy(layer).double(), x.double())
    # A check reads numbers, and so waits for the device.
    with mucudnn.patched(planning="live", database=":memory:", progress="off", check="off") as session:
        steps = []
        with without_waiting(device):
            for _ in range(STEPS):
                steps.append(gradients(layer, x))
                torch.arange(10, device=device).sum()
        records = session.records()
    for found in steps:
        for one, other in zip(found, expected, strict=True):
            assert (one.double() - other).norm() / other.norm() < 1e-5
    assert sum(record.trials for record in records) > 0, "something must have been tried"


@pytest.mark.usefixtures("eager")
def test_what_is_found_is_kept_for_the_next_run(device: torch.device, tmp_path: object) -> None:
    layer, x = nn.Conv2d(16, 16, 5, padding=2).to(device), torch.randn(16, 16, 32, 32, device=device)
    database = f"{tmp_path}/times.sqlite"
    divisions = []
    for steps in 400, 5:
        with mucudnn.patched(planning="live", database=database, progress="off") as session:
            for _ in range(steps):
                gradients(layer, x)
                if device.type == "cuda" and steps > 5:
                    torch.cuda.synchronize()  # so that times can be read while there are calls left
            divisions.append({record.direction: record.division for record in session.records()})
            tried = sum(record.trials for record in session.records())
    assert divisions[1] and divisions[1].items() <= divisions[0].items()
    assert tried == 0


@pytest.mark.usefixtures("eager")
def test_a_graph_s_capture_measures_nothing(cuda: torch.device) -> None:
    layer, x = nn.Conv2d(6, 8, 3, padding=1).to(cuda), torch.randn(6, 6, 17, 16, device=cuda)
    expected = layer(x)
    with mucudnn.patched(planning="live", database=":memory:", progress="off") as session, torch.no_grad():
        layer(x)
        before = sum(record.trials for record in session.records())
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            y = layer(x)
        graph.replay()
        torch.cuda.synchronize()
        assert sum(record.trials for record in session.records()) == before
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("eager")
def test_streams_and_threads_explore_side_by_side(device: torch.device) -> None:
    layer, failures = nn.Conv2d(6, 8, 3, padding=1).to(device), []
    x = torch.randn(6, 6, 17, 16, device=device)
    expected = layer(x).detach().double()

    def work() -> None:
        stream = torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else torch.no_grad()
        with stream, torch.no_grad():  # type: ignore[attr-defined]
            for _ in range(STEPS):
                if (layer(x).double() - expected).norm() / expected.norm() > 1e-5:
                    failures.append(threading.get_ident())

    if device.type == "cuda":
        torch.cuda.synchronize()
    with mucudnn.patched(planning="live", database=":memory:", progress="off"):
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
