"""mucudnn.convolve on arrays that lie on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import mucudnn
from mucudnn.runtime import arrays


@pytest.fixture(autouse=True)
def private_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUCUDNN_DATABASE", ":memory:")
    arrays.sessions.clear()


@pytest.mark.usefixtures("slow_stock")
def test_torch(device: torch.device) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 6, 20, 20, dtype=torch.float64, device=device)
    w = torch.randn(8, 3, 3, 3, dtype=torch.float64, device=device)
    result = mucudnn.convolve(x, w, padding=1, groups=2, workspace_limit="1MiB")
    assert result.device == x.device
    torch.testing.assert_close(result, functional.conv2d(x, w, padding=1, groups=2), rtol=1e-11, atol=1e-11)
    (record,) = arrays.session_within("1MiB").records()
    assert record.workspace <= 2**20


def test_two_devices_are_refused(cuda: torch.device) -> None:
    with pytest.raises(TypeError, match="one device"):
        mucudnn.convolve(torch.randn(2, 3, 8, 8, device=cuda), torch.randn(4, 3, 3, 3))


@pytest.mark.usefixtures("slow_stock")
def test_cupy(cuda: torch.device) -> None:
    """On a stream of CuPy's own, behind work that is yet to be done, results taken up and dropped again and again."""
    cupy = pytest.importorskip("cupy")
    torch.manual_seed(0)
    x, w = torch.randn(8, 6, 20, 20).double(), torch.randn(8, 6, 3, 3).double()
    expected = functional.conv2d(2 * x, w, padding=1).numpy()
    with cupy.cuda.Device(cuda.index or 0), cupy.cuda.Stream(non_blocking=True) as stream:
        mine, kernel = cupy.asarray(x.numpy()), cupy.asarray(w.numpy())
        for _ in range(20):
            doubled = mine * 2
            result = mucudnn.convolve(doubled, kernel, padding=1, workspace_limit="1MiB")
            assert type(result) is type(mine)
            del doubled
            total = result + 0
            del result
            cupy.testing.assert_allclose(total, expected, rtol=1e-10, atol=1e-10)
        stream.synchronize()
