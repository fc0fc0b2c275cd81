"""The backend of a job by the GPUs of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from distconv.place import backends

ONE, OTHER = "11111111-aaaa", "22222222-bbbb"


@pytest.mark.parametrize(
    "gpus, backend",
    [((ONE,), "nccl"), ((ONE, OTHER), "nccl"), ((ONE, ONE), "gloo"), ((ONE, ""), "gloo"), (("", ""), "gloo")],
)
def test_nccl_takes_a_gpu_for_each_rank(gpus: Sequence[str], backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    for rank, gpu in enumerate(gpus[1:], 1):
        store.set(f"distconv/gpu of {rank}", gpu)
    monkeypatch.setattr(backends, "_own_gpu", lambda: gpus[0])
    assert backends.agreed_backend(store, 0, len(gpus)) == backend
